// The library's own test: small products, attention and a decoding step against plain loops in double precision. It
// runs in a child process before a freshly built library is loaded, and on emulated machines (tests/kernels).
#pragma once
#include "attention.h"
#include "gemm.h"
#include "rows.h"

namespace selftest {

struct Noise {  // uniform in -1 .. 1, the same everywhere
  uint32_t state = 12345;
  float operator()() {
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
  }
};
template <typename T> static std::vector<T> draw(Noise& noise, size_t count) {
  std::vector<T> x(count);
  for (T& one : x) put(&one, noise());
  return x;
}
struct Error {  // largest difference over the largest element
  double gap = 0, top = 1e-30;
  void see(double got, double expected) {
    gap = std::max(gap, got == got ? std::fabs(got - expected) : 1e30);
    top = std::max(top, std::fabs(expected));
  }
  double relative() const { return gap / top; }
};

// Rows of every tile's height, columns that fill no panel, an odd number of products per sum, bias, and a second product
// that is added; every row alone has the same bits, and what lies behind the last row is not read.
template <typename T> static double product(int threads) {
  Noise noise;
  Error error;
  const long N = 71, K = 37, R = 19;
  for (long M : {1L, 2L, 3L, 4L, 5L, 6L, 7L, 11L, 12L, 13L, 50L, 200L}) {
    std::vector<T> a = draw<T>(noise, M * K), w = draw<T>(noise, N * K);
    a.resize(M * K + 1), put(&a[M * K], NAN);
    std::vector<float> bias = draw<float>(noise, N), out(M * N), alone(N);
    std::vector<float> b = draw<float>(noise, M * R), v = draw<float>(noise, N * R);
    std::vector<T> packed((N + PANEL - 1) / PANEL * panel_size<T>(K));
    std::vector<float> packed2((N + PANEL - 1) / PANEL * panel_size<float>(R));
    pack(w.data(), packed.data(), N, K, threads);
    pack(v.data(), packed2.data(), N, R, threads);
    Term term = {b.data(), packed2.data(), R, R}, own = term;
    Weight whole = {packed.data(), bias.data(), out.data(), N, N, &term, 1}, single = {packed.data(), bias.data(), alone.data(), N, N, &own, 1};
    gemm<T, float>(a.data(), K, M, K, &whole, 1, threads);
    for (long m = 0; m < M; ++m) {
      own.rows = b.data() + m * R;
      gemm<T, float>(a.data() + m * K, K, 1, K, &single, 1, 1);
      if (memcmp(alone.data(), out.data() + m * N, N * sizeof(float))) return 1;
      for (long n = 0; n < N; ++n) {
        double sum = bias[n];
        for (long k = 0; k < K; ++k) sum += (double)get(a[m * K + k]) * get(w[n * K + k]);
        for (long r = 0; r < R; ++r) sum += (double)b[m * R + r] * v[n * R + r];
        error.see(out[m * N + n], sum);
      }
    }
  }
  return error.relative();
}

// Packed attention of a prompt with two completions, and the last token of each again by a decoding step.
template <int C> static double attention() {
  Noise noise;
  Error error;
  const long H = 4, K = 2, prompt = 21, own = 19, rows = prompt + 2 * own;
  const Segment segments[] = {{0, prompt, 0, 0, 0, 0, 0},
                              {prompt, own, 0, prompt, 0, 0, prompt},
                              {prompt + own, own, 0, prompt, 0, 0, prompt + own}};
  std::vector<float> q = draw<float>(noise, rows * H * C), k = draw<float>(noise, rows * K * C), v = draw<float>(noise, rows * K * C);
  std::vector<float> out(rows * H * C), lse(rows * H);
  for (const Segment& g : segments)
    for (long head = 0; head < K; ++head)
      attend_segment<C>(q.data(), k.data(), v.data(), out.data(), lse.data(), H, K, head, g);
  for (const Segment& g : segments)
    for (long t = 0; t < g.count; ++t)
      for (long h = 0; h < H; ++h) {
        const long seen = g.shared + t + 1, head = h / (H / K), row = g.start + t;
        auto at = [&](long j) { return ((j < g.shared ? g.prefix + j : g.start + j - g.shared) * K + head) * C; };
        std::vector<double> weights(seen);
        double total = 0;
        for (long j = 0; j < seen; ++j) {
          double dot = 0;
          for (int c = 0; c < C; ++c) dot += (double)q[(row * H + h) * C + c] * k[at(j) + c];
          total += weights[j] = std::exp(dot / std::sqrt((double)C));
        }
        for (int c = 0; c < C; ++c) {
          double sum = 0;
          for (long j = 0; j < seen; ++j) sum += weights[j] / total * v[at(j) + c];
          error.see(out[(row * H + h) * C + c], sum);
        }
      }
  // The last row of the last segment from tiles, as a cache keeps them: the same bits.
  const Segment& g = segments[2];
  const long keys = g.shared + g.count, whole = tiles_of(keys) * TILE, last = rows - 1;
  for (long head = 0; head < K; ++head) {
    std::vector<float> tiles(whole * C), values(whole * C), again(H / K * C);
    gather<C>(k.data(), K, head, g, (float*)nullptr, tiles.data());
    gather<C>(v.data(), K, head, g, values.data(), (float*)nullptr);
    for (long shared : {0L, 16L, 32L}) {  // where the prompt's tiles lie changes nothing
      const Past<float> past = {tiles.data(), values.data(), shared, tiles.data() + shared * C, values.data() + shared * C};
      attend_row<C>(q.data() + (last * H + head * (H / K)) * C, past, again.data(), H / K, keys);
      if (memcmp(again.data(), out.data() + (last * H + head * (H / K)) * C, H / K * C * sizeof(float))) return 1;
    }
  }
  return error.relative();
}

// Norm, gate and the head's normaliser.
static double elementwise() {
  Noise noise;
  Error error;
  const long width = 48;
  std::vector<float> x = draw<float>(noise, width), u = draw<float>(noise, width), w = draw<float>(noise, width), out(width);
  norm_row(x.data(), (const float*)nullptr, w.data(), out.data(), (float*)nullptr, width, 1e-6f);
  double squares = 0, total = 0;
  for (float y : x) squares += (double)y * y, total += std::exp(20.0 * y);
  for (long c = 0; c < width; ++c) error.see(out[c], w[c] * x[c] / std::sqrt(squares / width + 1e-6));
  gate(x.data(), u.data(), out.data(), width);
  for (long c = 0; c < width; ++c) error.see(out[c], u[c] * x[c] / (1 + std::exp(-(double)x[c])));
  for (float& y : x) y *= 20.0f;
  error.see(normaliser_of(x.data(), width, nullptr), std::log(total));
  return error.relative();
}

// Largest relative error of all; 1 or more where rows depend on their neighbours.
static double run(int threads) {
  double worst = std::max(product<float>(threads), product<bf16>(threads));
  worst = std::max(worst, std::max(attention<16>(), attention<64>()));
  return std::max(worst, elementwise());
}

}  // namespace selftest
