// out[M, N] = a[M, K] w[N, K]^T + bias, with weights packed once into panels of columns. Invariant: each output is one
// chain of multiply-adds over k, in order. So it has the same bits for any M, any neighbouring rows and any tile shape:
// a decoding step (few rows) equals the trainer's batch (many rows). K must never be split over threads or registers.
#pragma once
#include "vec.h"
#include <algorithm>
#include <type_traits>

// Tile shapes that fit into the registers: ROWS rows times one panel, or fewer rows times several panels. Trap: a tile
// that needs one register too many is several times slower, because sums spill (measured by bench/isa.py).
enum {
  PANEL_VECS = REGISTERS == 32 && LANES == 4 ? 4 : 2,
  PANEL = PANEL_VECS * LANES,              // columns of a packed panel
  ROWS = LANES == 16 ? 12 : 6,             // rows of the largest tile
  SUMS = REGISTERS == 32 ? 24 : 12,        // registers that hold sums; the rest is for weights and a row's number
  GROUP = 128 / PANEL,                     // panels that a task takes
  BLOCK = 192 / ROWS,                      // tiles of rows that a task takes
};
constexpr int vecs_of(int rows) {  // registers across for this many rows: as many panels as fit, in powers of two
  int vecs = PANEL_VECS;
  while (2 * vecs * rows <= SUMS && 2 * vecs <= 8) vecs *= 2;
  return vecs;
}

// Storage and multiplication of a weight's type. `Row` is the type in which rows are read, STEP the numbers of a row
// per multiplication.
template <typename W> struct Product;
template <> struct Product<float> {
  typedef float Row;
  typedef vec Taken;
  enum { STEP = 1 };
  static inline vec take(const float* w) { return load_vec(w); }
  static inline vec step(vec sum, vec row, vec w) { return madd(row, w, sum); }
  static inline vec spread(const float* a) { return all(*a); }
};
#ifdef __AVX512BF16__
template <> struct Product<bf16> {  // pairs: one instruction multiplies and adds two numbers per lane
  typedef bf16 Row;
  typedef __m512i Taken;
  enum { STEP = 2 };
  static inline __m512i take(const bf16* w) { __m512i both; memcpy(&both, w, 64); return both; }
  static inline vec step(vec sum, __m512i row, __m512i w) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row, (__m512bh)w); }
  static inline __m512i spread(const bf16* a) { int32_t pair; memcpy(&pair, a, 4); return _mm512_set1_epi32(pair); }
};
#else
template <> struct Product<bf16> {  // widened in registers: half of float32's memory, and nearly its speed
  typedef float Row;
  typedef vec Taken;
  enum { STEP = 1 };
  static inline vec take(const bf16* w) { return load_vec(w); }
  static inline vec step(vec sum, vec row, vec w) { return madd(row, w, sum); }
  static inline vec spread(const float* a) { return all(*a); }
};
#endif
template <typename W> static inline long steps_of(long K) { return (K + Product<W>::STEP - 1) / Product<W>::STEP; }
template <typename W> static inline long panel_size(long K) { return steps_of<W>(K) * Product<W>::STEP * PANEL; }

// A product that is added to another one's rounded result: of float32 rows [M, K] and panels for the same columns.
struct Term { const float* rows; const float* packed; long lda, K; };
struct Weight { const void* packed; const void* bias; void* out; long N; long ldc; const Term* terms; long count; };

template <typename O> INLINE void write(O* out, vec x, const O* bias, long column, long N) {
  if (column + LANES <= N) {
    if (bias) x = x + load_vec(bias + column);
    store_vec(out, x);
    return;
  }
  float one[LANES]; store_vec(one, x);
  for (long i = column; i < N; ++i) put(out + i - column, bias ? one[i - column] + get(bias[i]) : one[i - column]);
}

// A tile of R rows and V registers across (V / PANEL_VECS panels). All sums stay in registers until the last k; with
// ADD what is there is added last.
template <typename W, typename O, bool ADD, int R, int V>
static void tile(const typename Product<W>::Row* a, long lda, const W* w, long size, long K, O* out, long ldc, const O* bias, long column, long N) {
  typedef Product<W> P;
  vec sums[R][V] = {};
  long steps = steps_of<W>(K);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; v += 64 / (4 * LANES)) __builtin_prefetch(out + r * ldc + column + v * LANES, 1);  // written at the end
UNROLL_SOME  // fewer mispredicted loop ends: 2 % faster at K = 128
  for (long k = 0; k < steps; ++k) {
    const W* at = w + k * PANEL * P::STEP;
    // Keep the weights in registers and broadcast the rows' numbers one by one, or the reverse if that needs fewer
    // registers; float32 weights may stay in memory as instruction operands.
    if (R >= V || sizeof(W) == 4) {
      typename P::Taken ws[V];
UNROLL
      for (int v = 0; v < V; ++v) ws[v] = P::take(at + v / PANEL_VECS * size + v % PANEL_VECS * LANES * P::STEP);
UNROLL
      for (int r = 0; r < R; ++r) {
        typename P::Taken row = P::spread(a + r * lda + k * P::STEP);
UNROLL
        for (int v = 0; v < V; ++v) sums[r][v] = P::step(sums[r][v], row, ws[v]);
      }
    } else {
      typename P::Taken row[R];
UNROLL
      for (int r = 0; r < R; ++r) row[r] = P::spread(a + r * lda + k * P::STEP);
UNROLL
      for (int v = 0; v < V; ++v) {
        typename P::Taken one = P::take(at + v / PANEL_VECS * size + v % PANEL_VECS * LANES * P::STEP);
UNROLL
        for (int r = 0; r < R; ++r) sums[r][v] = P::step(sums[r][v], row[r], one);
      }
    }
  }
  // Must be unrolled, too: a single non-constant index into `sums` would keep all of it in memory, stored at every
  // step.
UNROLL
  for (int r = 0; r < R; ++r)
UNROLL
    for (int v = 0; v < V; ++v)
      if (column + v * LANES < N) {
        O* to = out + r * ldc + column + v * LANES;
        write(to, sums[r][v], ADD ? to - (column + v * LANES) : bias, column + v * LANES, N);
      }
}

template <typename W, typename O, bool ADD, int R>
static void rows_panels(const typename Product<W>::Row* a, long lda, const W* w, long K, O* out, long ldc, const O* bias, long panel, long last, long N) {
  constexpr int V = vecs_of(R), P = V / PANEL_VECS;
  long size = panel_size<W>(K);
  for (; panel + P <= last; panel += P)
    tile<W, O, ADD, R, V>(a, lda, w + panel * size, size, K, out, ldc, bias, panel * PANEL, N);
  for (; panel < last; ++panel)
    tile<W, O, ADD, R, PANEL_VECS>(a, lda, w + panel * size, size, K, out, ldc, bias, panel * PANEL, N);
}

template <typename W, typename O, bool ADD>
static void rows_any(int R, const typename Product<W>::Row* a, long lda, const W* w, long K, O* out, long ldc, const O* bias, long panel, long last, long N) {
  switch (R) {
#define CASE(n) case n: return rows_panels<W, O, ADD, n>(a, lda, w, K, out, ldc, bias, panel, last, N);
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__)
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
  }
}

// Rows as products read them: in their type, and in whole steps. Unchanged, or copied once per task: widened, or with
// a 0 at their end. (A step over the end of a row would read what follows it, which times 0 is not 0 if it is not finite.)
template <typename W, typename T> static const typename Product<W>::Row* as_rows(const T* a, long lda, long rows, long K, long* stride) {
  typedef typename Product<W>::Row R;
  constexpr bool same = std::is_same<R, T>::value;
  *stride = same && K % Product<W>::STEP == 0 ? lda : steps_of<W>(K) * Product<W>::STEP;
  if constexpr (same)
    if (K % Product<W>::STEP == 0) return a;
  static thread_local Scratch memory;
  R* copy = (R*)memory.need(rows * (*stride + 16));
  for (long r = 0; r < rows; ++r) {
    R* to = copy + r * *stride;
    long k = 0;
    for (; k + 16 <= K; k += 16) store(to + k, load(a + r * lda + k));
    for (; k < K; ++k) put(to + k, get(a[r * lda + k]));
    for (; k < *stride; ++k) put(to + k, 0.0f);
  }
  return copy;
}

// Some rows times some panels of a weight.
template <typename W, typename O, bool ADD>
static void block(const typename Product<W>::Row* rows, long stride, long M, const W* packed, long K, O* out, const Weight& weight, long panel, long last) {
  long parts = (M + ROWS - 1) / ROWS, few = parts > 1 ? 1 : last - panel;
  for (; panel < last; panel += few)
    for (long part = 0; part < parts; ++part) {
      long first = M * part / parts, next = M * (part + 1) / parts;
      rows_any<W, O, ADD>(next - first, rows + first * stride, stride, packed, K, out + first * weight.ldc, weight.ldc,
                          (const O*)weight.bias, panel, std::min(panel + few, last), weight.N);
    }
}

// Several weights on the same rows, in one parallel region. Tasks split rows into blocks and columns into groups of
// panels: a block of rows stays in cache while its task walks through the group, and its results do until what else
// there is (`terms`) was added. Few rows instead share all columns among the threads, so that each weight is read from
// memory once. Rows are T, panels W.
template <typename T, typename O, typename W = T>
static void gemm(const T* a, long lda, long M, long K, const Weight* weights, int count, int threads) {
  double work = 0;
  for (int n = 0; n < count; ++n) work += (double)M * K * weights[n].N;
  threads = (int)std::max(1L, std::min<long>(threads, work / 5e5));  // waking threads costs more than a little work
  struct Task { int weight; long row, rows, panel, last; };
  std::vector<Task> tasks;
  long parts = (M + ROWS - 1) / ROWS, blocks = (parts + BLOCK - 1) / BLOCK;
  for (int n = 0; n < count; ++n) {
    long panels = (weights[n].N + PANEL - 1) / PANEL;
    long least = parts > 1 ? 1 : vecs_of((int)M) / PANEL_VECS;  // panels per pass over the rows
    long group = blocks > 1 ? (long)GROUP : std::max(least, panels / (4 * threads) / least * least);
    for (long b = 0; b < blocks; ++b)
      for (long p = 0; p < panels; p += group)
        tasks.push_back({n, M * b / blocks, M * (b + 1) / blocks - M * b / blocks, p, std::min(p + group, panels)});
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (size_t n = 0; n < tasks.size(); ++n) {
    const Task& task = tasks[n];
    const Weight& weight = weights[task.weight];
    long stride;
    const auto* rows = as_rows<W>(a + task.row * lda, lda, task.rows, K, &stride);
    O* out = (O*)weight.out + task.row * weight.ldc;
    block<W, O, false>(rows, stride, task.rows, (const W*)weight.packed, K, out, weight, task.panel, task.last);
    for (const Term* term = weight.terms; term < weight.terms + weight.count; ++term)
      block<float, O, true>(term->rows + task.row * term->lda, term->lda, task.rows, term->packed, term->K, out, weight, task.panel, task.last);
  }
}

// Packs a weight as [panel][k / STEP][column][k % STEP], the order in which a tile reads it; padding is 0.
template <typename S, typename T> static void pack(const S* w, T* out, long N, long K, int threads) {
  constexpr long width = Product<T>::STEP, some = 16 * width;
  long panels = (N + PANEL - 1) / PANEL, size = panel_size<T>(K);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long p = 0; p < panels; ++p) {
    T* to = out + p * size;
    long columns = std::min<long>(PANEL, N - p * PANEL);
    if (columns < PANEL || K % width) memset(to, 0, size * sizeof(T));
    for (long start = 0; start < K; start += some)
      for (long c = 0; c < columns; ++c) {
        const S* row = w + (p * PANEL + c) * K;
        T* at = to + (start / width * PANEL + c) * width;
        long count = std::min(some, K - start);
        if (std::is_same<S, T>::value && count == some)
          for (long k = 0; k < 16; ++k) memcpy(at + k * PANEL * width, row + start + k * width, width * sizeof(T));
        else
          for (long k = 0; k < count; ++k) put(at + k / width * PANEL * width + k % width, get(row[start + k]));
      }
  }
}
