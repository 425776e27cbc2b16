// The per-token operations of a decoder besides products: norms, rotary positions, the gated unit, and the head.
#pragma once
#include "vec.h"
#include <algorithm>

enum { ROW_BLOCK = 64 };

// RMS norm of x + delta (the residual, stored back in x); out in T, the type that the next product reads. R is the
// residual stream's type: as<R> rounds wherever the eager code would have stored a tensor. `rstd` may be null.
template <typename R, typename T, typename D>
static void norm_row(R* x, const D* delta, const R* weight, T* out, float* rstd, long width, float eps) {
  v16 squares = {};
  for (long c = 0; c < width; c += 16) {
    v16 y = load(x + c);
    if (delta) { y = as<R>(y + load(delta + c)); store(x + c, y); }
    squares = madd(y, y, squares);
  }
  float scale = 1.0f / std::sqrt(sum(squares) / width + eps);
  if (rstd) *rstd = scale;
  for (long c = 0; c < width; c += 16) store(out + c, as<R>(load(weight + c) * as<R>(load(x + c) * scale)));
}

// A head's own norm (Qwen3), in place: arithmetic in float32, weight of type R, numbers of type T.
template <typename R, typename T, int C> static void norm_head(T* x, const R* weight, float eps) {
  v16 squares = {};
  for (int c = 0; c < C; c += 16) { v16 y = load(x + c); squares = madd(y, y, squares); }
  float scale = 1.0f / std::sqrt(sum(squares) / C + eps);
  for (int c = 0; c < C; c += 16) store(x + c, load(weight + c) * as<T>(load(x + c) * scale));
}

template <typename R>
static void norm_back(const R* x, const R* weight, const float* rstd, const R* grad, R* dx, float* dw, long rows, long width, int threads) {
  long blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
  std::vector<float> parts(blocks * width, 0.0f);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long b = 0; b < blocks; ++b) {
    float* part = parts.data() + b * width;
    for (long row = b * ROW_BLOCK; row < std::min(rows, (b + 1) * ROW_BLOCK); ++row) {
      const R *xr = x + row * width, *gr = grad + row * width;
      float scale = rstd[row];
      v16 dots = {};
      for (long c = 0; c < width; c += 16) {
        v16 g = load(gr + c), y = load(xr + c) * scale;
        dots = madd(g * load(weight + c), y, dots);
        store(part + c, madd(g, y, load(part + c)));
      }
      float mean = sum(dots) / width;
      for (long c = 0; c < width; c += 16)
        store(dx + row * width + c, (load(gr + c) * load(weight + c) - load(xr + c) * scale * mean) * scale);
    }
  }
  for (long c = 0; c < width; c += 16) {
    v16 all = {};
    for (long b = 0; b < blocks; ++b) all = all + load(parts.data() + b * width + c);
    store(dw + c, all);
  }
}

// Rotates a head in halves; `sign` -1 undoes it (its transpose), which is the gradient.
template <typename T> static void rotate(const T* x, T* out, const float* cos, const float* sin, long channels, float sign) {
  long half = channels / 2;
  if (half % 16 == 0)
    for (long c = 0; c < half; c += 16) {
      v16 a = load(x + c), b = load(x + half + c);
      store(out + c, a * load(cos + c) - b * load(sin + c) * sign);
      store(out + half + c, b * load(cos + half + c) + a * load(sin + half + c) * sign);
    }
  else
    for (long c = 0; c < half; ++c) {
      float a = get(x[c]), b = get(x[half + c]);
      put(out + c, a * cos[c] - b * sin[c] * sign);
      put(out + half + c, b * cos[half + c] + a * sin[half + c] * sign);
    }
}

static inline v16 sigmoid(v16 x) { return 1.0f / (1.0f + exponential(-x)); }

template <typename T> static void gate(const T* g, const T* u, T* out, long count) {
  for (long c = 0; c < count; c += 16) {
    v16 x = load(g + c);
    store(out + c, as<T>(x * sigmoid(x)) * load(u + c));
  }
}

template <typename T> static void gate_back(const T* g, const T* u, const T* grad, T* dg, T* du, long count) {
  for (long c = 0; c < count; c += 16) {
    v16 x = load(g + c), s = sigmoid(x), y = load(grad + c);
    store(du + c, y * (x * s));
    store(dg + c, y * load(u + c) * (s * (1.0f + x * (1.0f - s))));
  }
}

// Divides the valid columns by the temperature; columns from `valid` on (padding) get -inf.
static inline void finish_row(float* z, long valid, long whole, float temperature) {
  if (temperature != 1.0f)
    for (long c = 0; c < valid; ++c) z[c] = z[c] / temperature;
  for (long c = valid; c < whole; ++c) z[c] = -INFINITY;
}

// Log-normaliser of a row of logits, and its entropy if requested. Columns of weight 0 are skipped in the entropy:
// there e * y would be 0 * -inf.
static inline float normaliser_of(const float* z, long whole, float* entropy) {
  v16 best = load(z);
  for (long c = 16; c < whole; c += 16) best = highest(best, load(z + c));
  float top = highest(best);
  v16 all = {}, mean = {};
  if (entropy)
    for (long c = 0; c < whole; c += 16) {
      v16 y = load(z + c) - top, e = exponential(y);
      all = all + e;
      mean = mean + where_positive(e, e * y);
    }
  else
    for (long c = 0; c < whole; c += 16) all = all + exponential(load(z + c) - top);
  float total = sum(all);
  if (entropy) *entropy = std::log(total) - sum(mean) / total;
  return top + std::log(total);
}

// Gradient of a row of logits, in place or in T: g (onehot - p) - e p (log p + H), divided by the temperature.
template <typename T>
static void back_row(const float* z, float normaliser, float g, float e, float entropy, long target, long whole, float temperature, T* out) {
  float factor = 1.0f / temperature, at = z[target] - normaliser, chosen = std::exp(at);  // out may be z
  for (long c = 0; c < whole; c += 16) {
    v16 y = load(z + c) - normaliser, p = exponential(y), d = p * -g;
    if (e != 0.0f) d = d - where_positive(p, p * (y + entropy) * e);
    store(out + c, d * factor);
  }
  put(out + target, (g - chosen * g - e * chosen * (at + entropy)) * factor);
}

// The first index whose cumulative weight exceeds uniform * total, over blocks of 128 and then inside one. Sums over
// blocks are float64. The target may be a last bit beyond the last block's sum, so the search steps back over empty
// blocks and ends at the last index with a weight above 0: a token outside the support is never drawn.
static inline long draw_row(const float* z, long whole, double uniform, std::vector<double>& blocks) {
  enum { WIDTH = 128 };
  v16 best = load(z);
  for (long c = 16; c < whole; c += 16) best = highest(best, load(z + c));
  float top = highest(best);
  long count = (whole + WIDTH - 1) / WIDTH;
  blocks.resize(count);
  double total = 0;
  for (long b = 0; b < count; ++b) {
    v16 all = {};
    for (long c = b * WIDTH; c < std::min(whole, (b + 1) * WIDTH); c += 16) all = all + exponential(load(z + c) - top);
    blocks[b] = sum(all);
    total += blocks[b];
  }
  double wanted = uniform * total, before = 0;
  long b = 0;
  while (b + 1 < count && before + blocks[b] <= wanted) before += blocks[b++];
  while (b > 0 && blocks[b] <= 0) before -= blocks[--b];
  long chosen = -1;
  double seen = 0, inside = wanted - before;
  for (long c = b * WIDTH; c < std::min(whole, (b + 1) * WIDTH); c += 16) {
    float e[16]; store(e, exponential(load(z + c) - top));
    for (int i = 0; i < 16; ++i)
      if (e[i] > 0) {
        chosen = c + i;
        seen += e[i];
        if (seen > inside) return chosen;
      }
  }
  return std::max(chosen, 0L);  // of logits that are not numbers none is above: any id that exists, never row -1
}
