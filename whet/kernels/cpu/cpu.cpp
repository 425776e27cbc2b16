// The entry points for whet/kernels/cpu/*.py: plain C, pointers and sizes, no dependency on PyTorch. A signature here
// must match SIGNATURES in ops.py, and a struct its ctypes.Structure: nothing checks them. `wide` says whether the
// tensors are float32 (1) or bfloat16 (0).
#include "attention.h"
#include "gemm.h"
#include "rows.h"
#include "selftest.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define PARALLEL _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")

EXPORT const char* whet_instruction_set() { return INSTRUCTION_SET; }
EXPORT double whet_selftest(int threads) { return selftest::run(threads); }

#define BY_CHANNELS(C, CALL) \
  switch (C) { \
    case 16: { constexpr int W = 16; CALL; } break; \
    case 32: { constexpr int W = 32; CALL; } break; \
    case 64: { constexpr int W = 64; CALL; } break; \
    case 128: { constexpr int W = 128; CALL; } break; \
  }

template <typename T, int W>
static void attend(const T* q, const T* k, const T* v, T* out, float* lse, long H, long K, const Segment* segments, long count, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (long n = 0; n < count * K; ++n) attend_segment<W>(q, k, v, out, lse, H, K, n % K, segments[n / K]);
}
EXPORT void whet_attend(int wide, const void* q, const void* k, const void* v, void* out, float* lse, long H, long K, long C,
                        const Segment* segments, long count, int threads) {
  if (wide) { BY_CHANNELS(C, (attend<float, W>((const float*)q, (const float*)k, (const float*)v, (float*)out, lse, H, K, segments, count, threads))) }
  else { BY_CHANNELS(C, (attend<bf16, W>((const bf16*)q, (const bf16*)k, (const bf16*)v, (bf16*)out, lse, H, K, segments, count, threads))) }
}

template <typename T, int W>
static void attend_back(const T* q, const T* k, const T* v, const T* out, const float* lse, const T* grad, T* dq, float* dk, float* dv,
                        long H, long K, const Segment* segments, long count, int threads) {
  std::vector<long> first;
  for (long n = 0; n < count; ++n)
    if (n == 0 || segments[n].group != segments[n - 1].group) first.push_back(n);
  first.push_back(count);
  long groups = (long)first.size() - 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (long n = 0; n < groups * K; ++n)
    for (long s = first[n / K]; s < first[n / K + 1]; ++s)
      back_segment<W>(q, k, v, out, lse, grad, dq, dk, dv, H, K, n % K, segments[s]);
}
EXPORT void whet_attend_back(int wide, const void* q, const void* k, const void* v, const void* out, const float* lse, const void* grad,
                             void* dq, float* dk, float* dv, long H, long K, long C, const Segment* segments, long count, int threads) {
#define ARGS(T) (const T*)q, (const T*)k, (const T*)v, (const T*)out, lse, (const T*)grad, (T*)dq, dk, dv, H, K, segments, count, threads
  if (wide) { BY_CHANNELS(C, (attend_back<float, W>(ARGS(float)))) }
  else { BY_CHANNELS(C, (attend_back<bf16, W>(ARGS(bf16)))) }
#undef ARGS
}

// A cache: keys [row][head][tile][channel][16], values [row][head][position][channel].
template <typename T> static void remember(const T* k, const T* v, T* keys, T* values, long row, long position, long K, long C, long S) {
  for (long h = 0; h < K; ++h) {
    T* to = keys + (((row * K + h) * (S / TILE) + position / TILE) * C) * TILE + position % TILE;
    for (long c = 0; c < C; ++c) to[c * TILE] = k[h * C + c];
    memcpy(values + ((row * K + h) * S + position) * C, v + h * C, C * sizeof(T));
  }
}
template <typename T>
static void write_cache(const T* k, const T* v, T* keys, T* values, const int64_t* rows, const int64_t* positions, long N, long K, long C, long S, int threads) {
PARALLEL
  for (long n = 0; n < N; ++n) remember(k + n * K * C, v + n * K * C, keys, values, rows[n], positions[n], K, C, S);
}
EXPORT void whet_write_cache(int wide, const void* k, const void* v, void* keys, void* values, const int64_t* rows,
                             const int64_t* positions, long N, long K, long C, long S, int threads) {
  if (wide) write_cache((const float*)k, (const float*)v, (float*)keys, (float*)values, rows, positions, N, K, C, S, threads);
  else write_cache((const bf16*)k, (const bf16*)v, (bf16*)keys, (bf16*)values, rows, positions, N, K, C, S, threads);
}

// One layer's cache: S positions of each row, P of each prompt; row r shares the first shared[r].count of prompt
// shared[r].slot.
struct Shared { int64_t slot, count; };
struct Cache { void *keys, *values, *prompt_keys, *prompt_values; int64_t S, P; const Shared* shared; };
template <int W, typename T> static Past<T> past_of(const Cache& c, long row, long head, long K) {
  long own = (row * K + head) * c.S * W, prompt = (c.shared[row].slot * K + head) * c.P * W;
  return {(const T*)c.prompt_keys + prompt, (const T*)c.prompt_values + prompt, c.shared[row].count, (const T*)c.keys + own, (const T*)c.values + own};
}

template <typename T, int W>
static void decode(const T* q, const Cache& cache, T* out, const int64_t* positions, long N, long H, long K, int threads) {
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1)
  for (long n = 0; n < N * K; ++n) {
    long row = n / K, rep = H / K, at = (row * H + n % K * rep) * W;
    attend_row<W>(q + at, past_of<W, T>(cache, row, n % K, K), out + at, rep, positions[row] + 1);
  }
}
EXPORT void whet_decode(int wide, const void* q, const Cache* cache, void* out, const int64_t* positions, long N, long H, long K, long C,
                        int threads) {
  if (wide) { BY_CHANNELS(C, (decode<float, W>((const float*)q, *cache, (float*)out, positions, N, H, K, threads))) }
  else { BY_CHANNELS(C, (decode<bf16, W>((const bf16*)q, *cache, (bf16*)out, positions, N, H, K, threads))) }
}

EXPORT void whet_pack(int source_wide, int wide, const void* w, void* out, long N, long K, int threads) {
  if (source_wide && wide) pack((const float*)w, (float*)out, N, K, threads);
  else if (source_wide) pack((const float*)w, (bf16*)out, N, K, threads);
  else if (wide) pack((const bf16*)w, (float*)out, N, K, threads);
  else pack((const bf16*)w, (bf16*)out, N, K, threads);
}
EXPORT long whet_packed_size(int wide, long N, long K) {
  return (N + PANEL - 1) / PANEL * (wide ? panel_size<float>(K) : panel_size<bf16>(K));
}
EXPORT void whet_linear(int wide, int out_wide, const void* a, long M, long K, const Weight* weights, int count, int threads) {
  if (wide) gemm<float, float>((const float*)a, K, M, K, weights, count, threads);
  else if (out_wide) gemm<bf16, float>((const bf16*)a, K, M, K, weights, count, threads);
  else gemm<bf16, bf16>((const bf16*)a, K, M, K, weights, count, threads);
}
// The same of float32 panels, whatever the rows are, into float32.
EXPORT void whet_narrow(int wide, const void* a, long M, long K, const Weight* weights, int count, int threads) {
  if (wide) gemm<float, float>((const float*)a, K, M, K, weights, count, threads);
  else gemm<bf16, float, float>((const bf16*)a, K, M, K, weights, count, threads);
}

template <typename R> static void norm(const R* x, const R* weight, R* out, float* rstd, long rows, long width, float eps, int threads) {
PARALLEL
  for (long n = 0; n < rows; ++n) norm_row((R*)x + n * width, (const R*)nullptr, weight, out + n * width, rstd + n, width, eps);
}
EXPORT void whet_norm(int wide, const void* x, const void* weight, void* out, float* rstd, long rows, long width, float eps, int threads) {
  if (wide) norm((const float*)x, (const float*)weight, (float*)out, rstd, rows, width, eps, threads);
  else norm((const bf16*)x, (const bf16*)weight, (bf16*)out, rstd, rows, width, eps, threads);
}
EXPORT void whet_norm_back(int wide, const void* x, const void* weight, const float* rstd, const void* grad, void* dx, float* dw,
                           long rows, long width, int threads) {
  if (wide) norm_back((const float*)x, (const float*)weight, rstd, (const float*)grad, (float*)dx, dw, rows, width, threads);
  else norm_back((const bf16*)x, (const bf16*)weight, rstd, (const bf16*)grad, (bf16*)dx, dw, rows, width, threads);
}

template <typename T>
static void rotate_all(const T* x, T* out, const float* cos, const float* sin, long N, long heads, long C, float sign, int threads) {
PARALLEL
  for (long n = 0; n < N; ++n)
    for (long h = 0; h < heads; ++h) rotate(x + (n * heads + h) * C, out + (n * heads + h) * C, cos + n * C, sin + n * C, C, sign);
}
EXPORT void whet_rotate(int wide, const void* x, void* out, const float* cos, const float* sin, long N, long heads, long C, float sign, int threads) {
  if (wide) rotate_all((const float*)x, (float*)out, cos, sin, N, heads, C, sign, threads);
  else rotate_all((const bf16*)x, (bf16*)out, cos, sin, N, heads, C, sign, threads);
}

EXPORT void whet_gate(int wide, const void* g, const void* u, void* out, long rows, long width, int threads) {
PARALLEL
  for (long n = 0; n < rows; ++n)
    if (wide) gate((const float*)g + n * width, (const float*)u + n * width, (float*)out + n * width, width);
    else gate((const bf16*)g + n * width, (const bf16*)u + n * width, (bf16*)out + n * width, width);
}
EXPORT void whet_gate_back(int wide, const void* g, const void* u, const void* grad, void* dg, void* du, long rows, long width, int threads) {
PARALLEL
  for (long n = 0; n < rows; ++n) {
    long at = n * width;
    if (wide) gate_back((const float*)g + at, (const float*)u + at, (const float*)grad + at, (float*)dg + at, (float*)du + at, width);
    else gate_back((const bf16*)g + at, (const bf16*)u + at, (const bf16*)grad + at, (bf16*)dg + at, (bf16*)du + at, width);
  }
}

// Logits are float32 [rows][whole]; `whole` is a multiple of 16 and at least the columns that the product wrote.
EXPORT void whet_score(float* z, const int64_t* targets, float* logprobs, float* normalisers, float* entropies, long rows, long valid,
                       long whole, float temperature, int threads) {
PARALLEL
  for (long n = 0; n < rows; ++n) {
    float* row = z + n * whole;
    finish_row(row, valid, whole, temperature);
    float normaliser = normaliser_of(row, whole, entropies ? entropies + n : nullptr);
    if (normalisers) normalisers[n] = normaliser;
    if (logprobs) logprobs[n] = row[targets[n]] - normaliser;
  }
}
EXPORT void whet_score_back(int wide, float* z, const int64_t* targets, const float* normalisers, const float* entropies, const float* g,
                            const float* e, void* out, long rows, long valid, long whole, float temperature, int finished, int threads) {
PARALLEL
  for (long n = 0; n < rows; ++n) {
    float* row = z + n * whole;
    if (!finished) finish_row(row, valid, whole, temperature);
    float weight = e ? e[n] : 0.0f;
    if (wide) back_row(row, normalisers[n], g[n], weight, entropies[n], targets[n], whole, temperature, (float*)out + n * whole);
    else back_row(row, normalisers[n], g[n], weight, entropies[n], targets[n], whole, temperature, (bf16*)out + n * whole);
  }
}

static inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}
static inline double uniform(int64_t seed, int64_t index) {
  uint32_t key = mix(mix((uint32_t)seed) ^ ((uint32_t)(seed >> 32) * 0x9E3779B1u));
  return ((mix(key + 0x9E3779B9u * (uint32_t)(index + 1)) >> 8) + 0.5) / 16777216.0;
}

// Live rows of an engine; ended rows write into the last column of tokens and logprobs.
struct Rows {
  int64_t *seeds, *positions, *counts, *limits, *last, *tokens;
  float* logprobs;
  bool *done, *stopped;
  int64_t width;
  const int64_t* stops;
  int64_t num_stops;
};

// Samples a token for row n (temperature 0: the most likely), stores it, and ends the row if it is done. Must match
// `whet.generate.rows.Rows.take` and `whet.generate.sampling`.
static void draw_token(float* row, const Rows& s, long n, long valid, long whole, float temperature) {
  static thread_local std::vector<double> blocks;
  finish_row(row, valid, whole, temperature == 0 ? 1.0f : temperature);
  int64_t token = temperature == 0 ? std::max_element(row, row + valid) - row : draw_row(row, whole, uniform(s.seeds[n], s.counts[n]), blocks);
  int64_t at = n * s.width + (s.done[n] ? s.width - 1 : s.counts[n]);
  s.tokens[at] = s.last[n] = token;
  s.logprobs[at] = row[token] - normaliser_of(row, whole, nullptr);
  if (s.done[n]) return;
  ++s.counts[n], ++s.positions[n];
  bool stops = std::find(s.stops, s.stops + s.num_stops, token) != s.stops + s.num_stops;
  s.stopped[n] = s.stopped[n] || stops;
  s.done[n] = stops || s.counts[n] >= s.limits[n];
}
EXPORT void whet_draw(float* z, const Rows* state, long rows, long valid, long whole, float temperature, int threads) {
PARALLEL
  for (long n = 0; n < rows; ++n) draw_token(z + n * whole, *state, n, valid, whole, temperature);
}

// Sum of squares: float32 lanes within blocks of 4096, float64 over blocks, in order: the same for any number of
// threads.
template <typename T> static double squares(const T* x, long count, int threads) {
  long blocks = (count + 4095) / 4096;
  std::vector<double> parts(blocks);
PARALLEL
  for (long b = 0; b < blocks; ++b) {
    long c = b * 4096, last = std::min(count, c + 4096);
    v16 all = {};
    for (; c + 16 <= last; c += 16) { v16 y = load(x + c); all = madd(y, y, all); }
    double total = sum(all);
    for (; c < last; ++c) total += (double)get(x[c]) * get(x[c]);
    parts[b] = total;
  }
  double total = 0;
  for (double part : parts) total += part;
  return total;
}
EXPORT double whet_squares(int wide, const void* x, long count, int threads) {
  return wide ? squares((const float*)x, count, threads) : squares((const bf16*)x, count, threads);
}

// AdamW on float32 weights: scales gradients by `factor` (clipping), and reads them in their own type.
struct Adam { float factor, lr, beta1, beta2, eps, decay, correction1, correction2; };
template <typename T>
static inline void adam16(float* master, const T* grad, float* first, float* second, const Adam& a, float root2, float rate, float keep) {
  v16 g = load(grad) * a.factor, m = load(first), v = load(second), x = load(master);
  m = madd(g - m, 1 - a.beta1, m);
  v = madd(g * g, 1 - a.beta2, v * a.beta2);
  x = x * keep - m * rate / (root(v) / root2 + a.eps);
  store(first, m), store(second, v), store(master, x);
}
template <typename T>
static void adamw(float* master, const T* grad, float* first, float* second, long count, const Adam& a, int threads) {
  float root2 = std::sqrt(a.correction2), rate = a.lr / a.correction1, keep = 1 - a.lr * a.decay;
  long blocks = (count + 4095) / 4096;
PARALLEL
  for (long b = 0; b < blocks; ++b) {
    long c = b * 4096, last = std::min(count, c + 4096);
    for (; c < last; c += 16) {
      long n = std::min(16L, last - c);
      if (n == 16) {
        adam16(master + c, grad + c, first + c, second + c, a, root2, rate, keep);
        continue;
      }
      float x[16] = {}, g[16] = {}, m[16] = {}, v[16] = {};  // the remainder, padded with zeros
      for (long i = 0; i < n; ++i) x[i] = master[c + i], g[i] = get(grad[c + i]), m[i] = first[c + i], v[i] = second[c + i];
      adam16(x, g, m, v, a, root2, rate, keep);
      for (long i = 0; i < n; ++i) master[c + i] = x[i], first[c + i] = m[i], second[c + i] = v[i];
    }
  }
}
EXPORT void whet_adamw(int wide, float* master, const void* grad, float* first, float* second, long count,
                       const Adam* a, int threads) {
  if (wide) adamw(master, (const float*)grad, first, second, count, *a, threads);
  else adamw(master, (const bf16*)grad, first, second, count, *a, threads);
}

// One token of every row through all layers of a Llama-like decoder. Every operation calls the same functions as the
// trainer's forward pass, so the bits are the same.
// An adapter beside a weight: A [rank, inputs] and B [outputs, rank], packed in float32; null for none.
struct Side { const float *a, *b; int64_t rank; float scaling; };
struct Sides { Side q, k, v, o, gate, up, down; };
struct Layer {
  const void *norm1, *norm2, *q, *k, *v, *o, *gate, *up, *down, *q_bias, *k_bias, *v_bias, *o_bias, *q_norm, *k_norm;
  const Sides* sides;  // those of each adapter; null for none
  Cache cache;
  // A layer's results per token, kept for the training step's backward pass; indexed by the token's place.
  struct { void *norm1, *q, *k, *v, *attended, *o, *norm2, *gate, *up, *gated, *down; float *rstd1, *rstd2, *lse; } kept;
};
struct Shape { int64_t M, D, H, K, C, F; float eps; int32_t threads; };
// Memory of the residual stream [M, D], tables of embeddings and rotary positions, and the last norm.
struct Outside { void* x; const void *embeddings, *norm; const float *cos, *sin; void *memory, *kept; float* kept_rstd; };

enum { OWN_BYTES = 8 << 20 };  // weights up to this size may be read by every thread: they stay in a shared cache

// Prefetches memory that is read next.
static inline void fetch(const void* from, long bytes) {
  for (long n = 0; n < bytes; n += 64) __builtin_prefetch((const char*)from + n, 0, 2);
}
// Attention of token m against cache row `row`, up to its own position. Only the row's own part is prefetched: the
// shared prompt was just read by the row before.
template <int W, typename T>
static void attend_heads(const Layer& l, const Shape& s, const T* qs, T* out, float* lse, long m, long row, long position) {
  const Cache& c = l.cache;
  long q = s.H * W, rep = s.H / s.K, size = ((position - c.shared[row].count) / TILE + 1) * TILE * W * sizeof(T);
  for (long head = 0; head < s.K; ++head) {
    long own = m * q + head * rep * W;
    Past<T> past = past_of<W, T>(c, row, head, s.K);
    fetch(past.values, size);
    if (head + 1 < s.K || row + 1 < s.M) fetch(past.keys + c.S * W, size);  // the next row's keys follow
    attend_row<W>(qs + own, past, out + own, rep, position + 1, lse ? lse + head * rep : nullptr);
  }
}
// Adds what an adapter makes of x [M, K] to y [M, N]: step by step what `_low_rank` in ops.py does, so the bits are the
// same. With `rows`, it does so for these M rows of x and y alone.
template <typename T>
static void beside_rows(const Side& side, const T* x, long K, T* y, long N, const long* rows, long M, int threads) {
  if (!side.a || !M) return;
  static thread_local Scratch memory;
  long inner = (side.rank + 15) / 16 * 16;
  float *z = memory.need(M * (inner + N + K)), *change = z + M * inner, *wide = change + M * N;
  const float* inputs = wide;
  if (std::is_same<T, float>::value && !rows) inputs = (const float*)x;
  else for (long m = 0; m < M; ++m) for (long k = 0; k < K; ++k) wide[m * K + k] = get(x[(rows ? rows[m] : m) * K + k]);
  Weight first = {side.a, nullptr, z, side.rank, inner}, second = {side.b, nullptr, change, N, N};
  gemm<float, float>(inputs, K, M, K, &first, 1, threads);
  for (long m = 0; m < M; ++m)
    for (long r = 0; r < inner; ++r) z[m * inner + r] = r < side.rank ? z[m * inner + r] * side.scaling : 0.0f;
  gemm<float, float>(z, inner, M, inner, &second, 1, threads);
  for (long m = 0; m < M; ++m) {
    T* to = y + (rows ? rows[m] : m) * N;
    for (long n = 0; n < N; ++n) put(to + n, change[m * N + n] + get(to[n]));
  }
}
// The same for rows with different adapters: `adapters` has the number of each row's, below 0 for none; null: all have
// the first. The rows of an adapter are gathered, so each adapter's weights are read once.
template <typename T>
static void beside(const Sides* sides, Side Sides::*which, const int32_t* adapters, const T* x, long K, T* y, long N, long M, int threads) {
  if (!sides) return;
  if (!adapters) return beside_rows(sides[0].*which, x, K, y, N, nullptr, M, threads);
  static thread_local std::vector<long> rows;
  for (int32_t number = 0, most = *std::max_element(adapters, adapters + M); number <= most; ++number) {
    rows.clear();
    for (long m = 0; m < M; ++m) if (adapters[m] == number) rows.push_back(m);
    beside_rows(sides[number].*which, x, K, y, N, (long)rows.size() == M ? nullptr : rows.data(), rows.size(), threads);
  }
}
// Tokens first .. first + M through all layers, with up to `all` threads. Token m is the next one of cache row m; or,
// with `slots`, one of a prompt that is read into slots[m]. With `places`, its results are kept at places[m], unless
// that is below 0.
template <typename R, typename T, int W>
static void layers_part(const Layer* layers, long count, const Shape& s, const Outside& o, const int64_t* tokens, const int64_t* positions,
                        const int64_t* slots, const int64_t* places, const int32_t* adapters, R* out, long first, long M, int all) {
  long D = s.D, q = s.H * s.C, kv = s.K * s.C;
  auto worth = [&](double work) { return (int)std::max(1.0, std::min<double>(all, work / 8192)); };  // as _threads in ops.py
  int threads = worth(M * D), some = worth(M * s.F), most = worth(M * q * (64.0 + positions[first]) / 8);
  R* x = (R*)o.x + first * D;
  T* memory = (T*)o.memory;  // consecutive arrays [s.M, ...]; this part uses its own rows of each
  auto own = [&](long width) { T* mine = memory + first * width; memory += s.M * width; return mine; };
  T *h = own(std::max(D, q)), *qs = own(q), *ks = own(kv), *vs = own(kv), *g = own(s.F), *u = own(s.F), *delta = own(D);
  tokens += first, positions += first, out += first * D;
  if (places) places += first;
  if (adapters) adapters += first;
  auto kept_at = [&](float* base, long m, long width) { return places && places[m] >= 0 ? base + places[m] * width : nullptr; };
  auto keep = [&](void* base, const void* from, long bytes) {
    for (long m = 0; places && m < M; ++m)
      if (places[m] >= 0) memcpy((char*)base + places[m] * bytes, (const char*)from + m * bytes, bytes);
  };
  for (long m = 0; m < M; ++m) memcpy(x + m * D, (const R*)o.embeddings + tokens[m] * D, D * sizeof(R));
  for (long n = 0; n <= count; ++n) {
    const Layer* l = layers + n;
    if (n) keep(layers[n - 1].kept.down, delta, D * sizeof(T));
PARALLEL
    for (long m = 0; m < M; ++m) {
      const T* change = n ? delta + m * D : nullptr;
      if (n < count) norm_row(x + m * D, change, (const R*)l->norm1, h + m * D, kept_at(l->kept.rstd1, m, 1), D, s.eps);
      else norm_row(x + m * D, change, (const R*)o.norm, out + m * D, kept_at(o.kept_rstd, m, 1), D, s.eps);
    }
    if (n == count) return keep(o.kept, out, D * sizeof(R));
    keep(l->kept.norm1, h, D * sizeof(T));
    Weight qkv[3] = {{l->q, l->q_bias, qs, q, q}, {l->k, l->k_bias, ks, kv, kv}, {l->v, l->v_bias, vs, kv, kv}};
    gemm<T, T>(h, D, M, D, qkv, 3, all);
    beside(l->sides, &Sides::q, adapters, h, D, qs, q, M, all), beside(l->sides, &Sides::k, adapters, h, D, ks, kv, M, all), beside(l->sides, &Sides::v, adapters, h, D, vs, kv, M, all);
#pragma omp parallel for schedule(dynamic, 4) num_threads(most) if (most > 1)
    for (long m = 0; m < M; ++m) {
      for (long i = 0; i < s.H + s.K; ++i) {
        T* head = i < s.H ? qs + m * q + i * W : ks + m * kv + (i - s.H) * W;
        const R* scale = (const R*)(i < s.H ? l->q_norm : l->k_norm);
        if (scale) norm_head<R, T, W>(head, scale, s.eps);
        rotate(head, head, o.cos + positions[m] * W, o.sin + positions[m] * W, W, 1.0f);
      }
      const Cache& c = l->cache;
      if (slots) {
        remember(ks + m * kv, vs + m * kv, (T*)c.prompt_keys, (T*)c.prompt_values, slots[m], positions[m], s.K, W, c.P);
        continue;
      }
      long row = first + m, own = positions[m] - c.shared[row].count;
      remember(ks + m * kv, vs + m * kv, (T*)c.keys, (T*)c.values, row, own, s.K, W, c.S);
      attend_heads<W>(*l, s, (const T*)qs, h, kept_at(l->kept.lse, m, s.H), m, row, positions[m]);
    }
    if (slots) {  // only after all keys are written: tokens of a prompt attend to each other
#pragma omp parallel for schedule(dynamic, 1) num_threads(most) if (most > 1)
      for (long m = 0; m < M; ++m)
        for (long head = 0; head < s.K; ++head) {
          long at = (slots[m] * s.K + head) * l->cache.P * W, own = m * q + head * (s.H / s.K) * W;
          Past<T> past = {nullptr, nullptr, 0, (const T*)l->cache.prompt_keys + at, (const T*)l->cache.prompt_values + at};
          float* lse = kept_at(l->kept.lse, m, s.H);
          attend_row<W>((const T*)qs + own, past, h + own, s.H / s.K, positions[m] + 1, lse ? lse + head * (s.H / s.K) : nullptr);
        }
    }
    keep(l->kept.q, qs, q * sizeof(T)), keep(l->kept.k, ks, kv * sizeof(T)), keep(l->kept.v, vs, kv * sizeof(T));
    keep(l->kept.attended, h, q * sizeof(T));
    Weight second = {l->o, l->o_bias, delta, D, D};
    gemm<T, T>(h, q, M, q, &second, 1, all);
    beside(l->sides, &Sides::o, adapters, h, q, delta, D, M, all);
    keep(l->kept.o, delta, D * sizeof(T));
PARALLEL
    for (long m = 0; m < M; ++m)
      norm_row(x + m * D, (const T*)delta + m * D, (const R*)l->norm2, h + m * D, kept_at(l->kept.rstd2, m, 1), D, s.eps);
    keep(l->kept.norm2, h, D * sizeof(T));
    Weight third[2] = {{l->gate, nullptr, g, s.F, s.F}, {l->up, nullptr, u, s.F, s.F}};
    gemm<T, T>(h, D, M, D, third, 2, all);
    beside(l->sides, &Sides::gate, adapters, h, D, g, s.F, M, all), beside(l->sides, &Sides::up, adapters, h, D, u, s.F, M, all);
    keep(l->kept.gate, g, s.F * sizeof(T)), keep(l->kept.up, u, s.F * sizeof(T));
#pragma omp parallel for schedule(static) num_threads(some) if (some > 1)
    for (long m = 0; m < M; ++m) gate(g + m * s.F, u + m * s.F, g + m * s.F, s.F);
    keep(l->kept.gated, g, s.F * sizeof(T));
    Weight fourth = {l->down, nullptr, delta, D, D};
    gemm<T, T>(g, s.F, M, s.F, &fourth, 1, all);
    beside(l->sides, &Sides::down, adapters, g, s.F, delta, D, M, all);
  }
}
// Rows are independent in a decoding step. If there are enough of them, or the weights are small enough for every
// thread to read, each thread takes its rows through all layers: one barrier per step instead of eight per layer, which
// get long when other processes use the cores. Otherwise the threads share each weight's columns, so that it is read
// from memory once.
template <typename R, typename T, int W>
static void layers_of(const Layer* layers, long count, const Shape& s, const Outside& o, const int64_t* tokens, const int64_t* positions,
                      const int64_t* slots, const int64_t* places, const int32_t* adapters, R* out) {
  double weights = (double)count * s.D * (2.0 * s.H * s.C + 2.0 * s.K * s.C + 3.0 * s.F);
  long each = s.M / s.threads;
  bool is_worth = s.M * weights >= 5e5 * s.threads && (each >= 24 || (each >= 2 && weights * sizeof(T) <= OWN_BYTES));
  if (slots || s.threads == 1 || !is_worth) return layers_part<R, T, W>(layers, count, s, o, tokens, positions, slots, places, adapters, out, 0, s.M, s.threads);
  long parts = s.threads;
#pragma omp parallel for schedule(static, 1) num_threads(s.threads)
  for (long p = 0; p < parts; ++p) {
    long first = s.M * p / parts;
    layers_part<R, T, W>(layers, count, s, o, tokens, positions, nullptr, places, adapters, out, first, s.M * (p + 1) / parts - first, 1);
  }
}
EXPORT void whet_layers(int residual_wide, int wide, const Layer* layers, long count, const Shape* s, const Outside* o, const int64_t* tokens,
                        const int64_t* positions, const int64_t* slots, const int64_t* places, const int32_t* adapters, void* out) {
#define ARGS(R, T) layers, count, *s, *o, tokens, positions, slots, places, adapters, (R*)out
  if (wide) { BY_CHANNELS(s->C, (layers_of<float, float, W>(ARGS(float, float)))) }
  else if (residual_wide) { BY_CHANNELS(s->C, (layers_of<float, bf16, W>(ARGS(float, bf16)))) }
  else { BY_CHANNELS(s->C, (layers_of<bf16, bf16, W>(ARGS(bf16, bf16)))) }
#undef ARGS
}
EXPORT long whet_layers_memory(const Shape* s) {
  long q = s->H * s->C, kv = s->K * s->C;
  return s->M * (std::max(s->D, q) + q + 2 * kv + 2 * s->F + s->D) * 4 + 1024;
}
