// Causal attention of grouped queries in float32 arithmetic. Invariant: the bits of a query's result do not depend on
// the other queries: scores add up channel by channel, outputs key by key, in order. So decoding, prefill and training
// agree. (Unlike flash attention: no running maximum over blocks, whose order of sums would depend on the blocks.) Keys
// lie in tiles of 16, transposed: [tile][channel][16].
#pragma once
#include "vec.h"
#include <algorithm>

enum { TILE = 16 };
static inline long tiles_of(long keys) { return (keys + TILE - 1) / TILE; }

// Registers across for the sums of R rows; the remaining ones hold a key's and a query's numbers.
constexpr int across(int rows) {
  int vecs = 1;
  while (2 * vecs * rows <= (REGISTERS == 32 ? 16 : 12) && 2 * vecs <= 8) vecs *= 2;
  return vecs;
}

// s[r][16 tile + lane] = q[r] . key, for V registers of keys from `first` (in registers) on.
template <int R, int C, int V, typename T> static inline void scores_part(const float* q, const T* kt, long first, float* s, long ss) {
  constexpr int PART = TILE / LANES;  // registers of a tile
  const T* at[V];
  vec sums[R][V] = {};
UNROLL
  for (int v = 0; v < V; ++v) at[v] = kt + (first + v) / PART * C * TILE + (first + v) % PART * LANES;
  for (int c = 0; c < C; ++c) {
    vec k[V];
UNROLL
    for (int v = 0; v < V; ++v) k[v] = load_vec(at[v] + c * TILE);
UNROLL
    for (int r = 0; r < R; ++r) {
      vec x = all(q[r * C + c]);
UNROLL
      for (int v = 0; v < V; ++v) sums[r][v] = madd(x, k[v], sums[r][v]);
    }
  }
UNROLL
  for (int r = 0; r < R; ++r)
UNROLL
    for (int v = 0; v < V; ++v) store_vec(s + r * ss + (first + v) * LANES, sums[r][v]);
}
template <int R, int C, typename T> static void scores_rows(const float* q, const T* kt, long tiles, float* s, long ss) {
  constexpr int V = across(R), PART = TILE / LANES, LEAST = PART < V ? PART : V;
  long first = 0, last = tiles * PART;
  for (; first + V <= last; first += V) scores_part<R, C, V>(q, kt, first, s, ss);
  for (; first < last; first += LEAST) scores_part<R, C, LEAST>(q, kt, first, s, ss);
}

// out[r] += sum over j of w[r rs + j cs] b[j]
template <int R, int C, int V, typename T>
static inline void add_part(float* out, const float* w, long rs, long cs, const T* b, long bs, long count) {
  vec sums[R][V];
UNROLL
  for (int r = 0; r < R; ++r)
UNROLL
    for (int v = 0; v < V; ++v) sums[r][v] = load_vec(out + r * C + v * LANES);
  for (long j = 0; j < count; ++j) {
    vec x[V];
UNROLL
    for (int v = 0; v < V; ++v) x[v] = load_vec(b + j * bs + v * LANES);
UNROLL
    for (int r = 0; r < R; ++r) {
      vec weight = all(w[r * rs + j * cs]);
UNROLL
      for (int v = 0; v < V; ++v) sums[r][v] = madd(weight, x[v], sums[r][v]);
    }
  }
UNROLL
  for (int r = 0; r < R; ++r)
UNROLL
    for (int v = 0; v < V; ++v) store_vec(out + r * C + v * LANES, sums[r][v]);
}
template <int R, int C, typename T>
static void add_rows(float* out, const float* w, long rs, long cs, const T* b, long bs, long count) {
  constexpr int ALL = C / LANES, V = across(R) < ALL ? across(R) : ALL;  // C is 16, 32, 64 or 128
  for (int v = 0; v < ALL; v += V) add_part<R, C, V>(out + v * LANES, w, rs, cs, b + v * LANES, bs, count);
}

template <int C, typename T> static void scores(int R, const float* q, const T* kt, long tiles, float* s, long ss) {
  if (R == 4) scores_rows<4, C>(q, kt, tiles, s, ss);
  else if (R == 3) scores_rows<3, C>(q, kt, tiles, s, ss);
  else if (R == 2) scores_rows<2, C>(q, kt, tiles, s, ss);
  else scores_rows<1, C>(q, kt, tiles, s, ss);
}
template <int C, typename T>
static void add(int R, float* out, const float* w, long rs, long cs, const T* b, long bs, long count) {
  if (R == 4) add_rows<4, C>(out, w, rs, cs, b, bs, count);
  else if (R == 3) add_rows<3, C>(out, w, rs, cs, b, bs, count);
  else if (R == 2) add_rows<2, C>(out, w, rs, cs, b, bs, count);
  else add_rows<1, C>(out, w, rs, cs, b, bs, count);
}

// Turns the scores of the first `limit` keys into weights not yet divided by their sum; later ones become exactly 0.
static inline void weigh(float* s, long tiles, long limit, float* total, float* top) {
  for (long j = limit; j < tiles * TILE; ++j) s[j] = -INFINITY;
  v16 best = load(s);
  for (long t = 1; t < tiles; ++t) best = highest(best, load(s + t * TILE));
  *top = highest(best);
  v16 all = {};
  for (long t = 0; t < tiles; ++t) {
    v16 e = exponential(load(s + t * TILE) - *top);
    store(s + t * TILE, e);
    all = all + e;
  }
  *total = sum(all);
}

// A sequence in a flat batch: its keys are `shared` rows from `prefix` on, then `count` rows of its own from `start` on.
// Its queries are those of its own rows from the `first` on, which stand from row `at` on: all of them, unless another
// rank has the rest. Segments of one group are adjacent, and only they share keys: the backward pass runs a group on
// one thread, so that no two threads add to the same dk and dv.
struct Segment { int64_t start, count, prefix, shared, group, first, at; };

template <int C, typename T>
static void gather(const T* x, long heads, long head, const Segment& g, float* rows, float* tiles) {
  long keys = g.shared + g.count, whole = tiles_of(keys) * TILE;
  for (long j = 0; j < whole; ++j) {
    const T* from = x + ((j < g.shared ? g.prefix + j : g.start + j - g.shared) * heads + head) * C;
    for (int c = 0; c < C; c += 16) {
      v16 y = j < keys ? load(from + c) : v16{};
      if (rows) store(rows + j * C + c, y);
      if (tiles) {
        float one[16]; store(one, y);
        for (int i = 0; i < 16; ++i) tiles[(j / TILE * C + c + i) * TILE + j % TILE] = one[i];
      }
    }
  }
}

template <int C, typename T>
static void attend_segment(const T* q, const T* k, const T* v, T* out, float* lse, long H, long K, long head, const Segment& g) {
  static thread_local Scratch memory;
  long keys = g.shared + g.count, whole = tiles_of(keys) * TILE, rep = H / K, own = g.at - g.first;
  float* kt = memory.need(2 * whole * C + 4 * whole + 8 * C);
  float *vb = kt + whole * C, *s = vb + whole * C, *qb = s + 4 * whole, *ob = qb + 4 * C;
  gather<C>(k, K, head, g, (float*)nullptr, kt);
  gather<C>(v, K, head, g, vb, (float*)nullptr);
  float scale = 1.0f / std::sqrt((float)C);
  for (long h = head * rep; h < (head + 1) * rep; ++h)
    for (long t = g.first; t < g.count; t += 4) {
      int R = (int)std::min(4L, g.count - t);
      long last = g.shared + t + R, tiles = tiles_of(last);
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; c += 16) store(qb + r * C + c, load(q + ((own + t + r) * H + h) * C + c) * scale);
      scores<C>(R, qb, kt, tiles, s, whole);
      float total[4], top[4];
      for (int r = 0; r < R; ++r) weigh(s + r * whole, tiles, last - R + r + 1, total + r, top + r);
      memset(ob, 0, 4 * C * sizeof(float));
      add<C>(R, ob, s, whole, 1, vb, C, last);
      for (int r = 0; r < R; ++r) {
        long row = own + t + r;
        if (lse) lse[row * H + h] = top[r] + std::log(total[r]);
        for (int c = 0; c < C; c += 16) store(out + (row * H + h) * C + c, load(ob + r * C + c) * (1.0f / total[r]));
      }
    }
}

// The past of a cache row: keys in tiles and values [position][channel]. Its first `shared` positions, a multiple of
// TILE, are in its prompt's slot, which all samples of the prompt read; the others are its own. Tiles are computed as
// in one piece, so the location of a position changes no bit.
template <typename T> struct Past { const T *prompt_keys, *prompt_values; long shared; const T *keys, *values; };

// One query per row; `lse`, if any, is each head's log of the sum of its scores' exponentials.
template <int C, typename T>
static void attend_row(const T* q, const Past<T>& past, T* out, long rep, long limit, float* lse = nullptr) {
  static thread_local Scratch memory;
  long tiles = tiles_of(limit), whole = tiles * TILE, shared = past.shared;
  float* s = memory.need(4 * whole + 8 * C);
  float *qb = s + 4 * whole, *ob = qb + 4 * C;
  float scale = 1.0f / std::sqrt((float)C);
  for (long h = 0; h < rep; h += 4) {
    int R = (int)std::min(4L, rep - h);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; c += 16) store(qb + r * C + c, load(q + (h + r) * C + c) * scale);
    if (shared) scores<C>(R, qb, past.prompt_keys, shared / TILE, s, whole);
    scores<C>(R, qb, past.keys, tiles - shared / TILE, s + shared, whole);
    float total[4], top[4];
    for (int r = 0; r < R; ++r) weigh(s + r * whole, tiles, limit, total + r, top + r);
    if (lse)
      for (int r = 0; r < R; ++r) lse[h + r] = top[r] + std::log(total[r]);
    memset(ob, 0, 4 * C * sizeof(float));
    if (shared) add<C>(R, ob, s, whole, 1, past.prompt_values, C, shared);
    add<C>(R, ob, s + shared, whole, 1, past.values, C, limit - shared);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; c += 16) store(out + (h + r) * C + c, load(ob + r * C + c) * (1.0f / total[r]));
  }
}

// Adds the gradients of one segment for one key/value head; dk and dv are float32 [N, K, C] and start at 0. Weights are
// recomputed from the forward pass's log-sum-exp; with delta = grad . out, the gradient of a score is p (dp - delta).
template <int C, typename T>
static void back_segment(const T* q, const T* k, const T* v, const T* out, const float* lse, const T* grad, T* dq, float* dk,
                         float* dv, long H, long K, long head, const Segment& g) {
  enum { BLOCK_ROWS = 32 };
  static thread_local Scratch memory;
  long keys = g.shared + g.count, whole = tiles_of(keys) * TILE, rep = H / K, own = g.at - g.first, B = BLOCK_ROWS;
  float* kt = memory.need(5 * whole * C + 2 * B * whole + 3 * B * C);
  float *vt = kt + whole * C, *kb = vt + whole * C, *dkb = kb + whole * C, *dvb = dkb + whole * C;
  float *p = dvb + whole * C, *d = p + B * whole, *qb = d + B * whole, *gb = qb + B * C, *ob = gb + B * C;
  gather<C>(k, K, head, g, kb, kt);
  gather<C>(v, K, head, g, (float*)nullptr, vt);
  memset(dkb, 0, 2 * whole * C * sizeof(float));
  float scale = 1.0f / std::sqrt((float)C);
  for (long h = head * rep; h < (head + 1) * rep; ++h)
    for (long t = g.first; t < g.count; t += B) {
      long R = std::min(B, g.count - t), last = g.shared + t + R;
      float delta[BLOCK_ROWS];
      for (long r = 0; r < R; ++r) {
        long at = ((own + t + r) * H + h) * C;
        v16 dot = {};
        for (int c = 0; c < C; c += 16) {
          v16 y = load(grad + at + c);
          store(qb + r * C + c, load(q + at + c) * scale);
          store(gb + r * C + c, y);
          dot = madd(y, load(out + at + c), dot);
        }
        delta[r] = sum(dot);
      }
      memset(ob, 0, R * C * sizeof(float));
      for (long r = 0; r < R; r += 4) {
        int some = (int)std::min(4L, R - r);
        long limit = last - R + r + some, tiles = tiles_of(limit);
        scores<C>(some, qb + r * C, kt, tiles, p + r * whole, whole);
        scores<C>(some, gb + r * C, vt, tiles, d + r * whole, whole);
        for (int i = 0; i < some; ++i) {
          float *pr = p + (r + i) * whole, *dr = d + (r + i) * whole;
          for (long j = limit - some + i + 1; j < tiles * TILE; ++j) pr[j] = -INFINITY;
          float normaliser = lse[(own + t + r + i) * H + h];
          for (long j = 0; j < tiles; ++j) {
            v16 e = exponential(load(pr + j * TILE) - normaliser);
            store(pr + j * TILE, e);
            store(dr + j * TILE, e * (load(dr + j * TILE) - delta[r + i]));
          }
        }
        add<C>(some, ob + r * C, d + r * whole, whole, 1, kb, C, limit);
      }
      for (long r = 0; r < R; ++r)
        for (int c = 0; c < C; c += 16) store(dq + ((own + t + r) * H + h) * C + c, load(ob + r * C + c) * scale);
      for (long j = 0; j < last; j += 4) {
        int some = (int)std::min(4L, last - j);
        long r = std::max(0L, j - g.shared - t) / 4 * 4;  // earlier rows do not attend to these keys
        add<C>(some, dkb + j * C, d + r * whole + j, 1, whole, qb + r * C, C, R - r);
        add<C>(some, dvb + j * C, p + r * whole + j, 1, whole, gb + r * C, C, R - r);
      }
    }
  for (long j = 0; j < keys; ++j) {
    long row = ((j < g.shared ? g.prefix + j : g.start + j - g.shared) * K + head) * C;
    for (int c = 0; c < C; c += 16) {
      store(dk + row + c, load(dk + row + c) + load(dkb + j * C + c));
      store(dv + row + c, load(dv + row + c) + load(dvb + j * C + c));
    }
  }
}
