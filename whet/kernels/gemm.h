// out[M, N] = a[M, K] w[N, K]^T + bias, with weights packed once into panels of 32 columns.
// Each output is one chain of multiply-adds over k: the same number whatever M is, and whichever rows stand beside it.
#pragma once
#include "vec.h"
#include <algorithm>
#include <type_traits>

enum { PANEL = 32, ROWS = 12, GROUP = 4, BLOCK = 16 };

static inline long pairs(const float*, long K) { return K; }
static inline long pairs(const bf16*, long K) { return (K + 1) / 2; }
static inline long panel_size(const float*, long K) { return K * PANEL; }
static inline long panel_size(const bf16*, long K) { return (K + 1) / 2 * 2 * PANEL; }

static inline v16 step(v16 acc, const float* a, const float* w) { return acc + same(*a) * load(w); }
#ifdef __AVX512BF16__
static inline v16 step(v16 acc, const bf16* a, const bf16* w) {
  int32_t pair; memcpy(&pair, a, 4);
  __m512i both; memcpy(&both, w, 64);
  return (v16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)both);
}
#else
static inline v16 step(v16 acc, const bf16* a, const bf16* w) {
  h16 low, high;
  for (int i = 0; i < 16; ++i) { low[i] = w[2 * i].bits; high[i] = w[2 * i + 1].bits; }
  v16 first = (v16)(__builtin_convertvector(low, w16) << 16), second = (v16)(__builtin_convertvector(high, w16) << 16);
  return (acc + same(get(a[0])) * first) + same(get(a[1])) * second;
}
#endif
static inline long stride(const float*) { return 1; }
static inline long stride(const bf16*) { return 2; }

struct Weight { const void* packed; const void* bias; void* out; long N; long ldc; };

template <typename T> static inline void write(T* out, v16 x, const T* bias, long column, long N) {
  if (bias) {
    if (column + 16 <= N) x = x + load(bias + column);
    else for (long i = column; i < N; ++i) x[i - column] += get(bias[i]);
  }
  if (column + 16 <= N) store(out, x);
  else for (long i = column; i < N; ++i) put(out + i - column, x[i - column]);
}

template <typename T, typename O, int R, int P>
static void rows_panels(const T* a, long lda, const T* w, long size, long K, O* out, long ldc, const O* bias, long column, long N) {
  v16 acc[R][2 * P] = {};
  long steps = pairs(a, K), width = stride(a);
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < 2 * P; ++p) __builtin_prefetch(out + r * ldc + column + 16 * p, 1);  // written at the end
  for (long k = 0; k < steps; ++k) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < 2 * P; ++p)
        acc[r][p] = step(acc[r][p], a + r * lda + k * width, w + (p / 2) * size + (k * PANEL + (p % 2) * 16) * width);
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < 2 * P; ++p)
      if (column + 16 * p < N) write(out + r * ldc + column + 16 * p, acc[r][p], bias, column + 16 * p, N);
}

template <typename T, typename O, int R>
static void rows_group(const T* a, long lda, const T* w, long K, O* out, long ldc, const O* bias, long panel, long last, long N) {
  constexpr int P = R <= 2 ? 4 : R <= 6 ? 2 : 1;
  long size = panel_size(a, K);
  for (; panel + P <= last; panel += P)
    rows_panels<T, O, R, P>(a, lda, w + panel * size, size, K, out, ldc, bias, panel * PANEL, N);
  for (; panel < last; ++panel)
    rows_panels<T, O, R, 1>(a, lda, w + panel * size, size, K, out, ldc, bias, panel * PANEL, N);
}

template <typename T, typename O>
static void rows_any(int R, const T* a, long lda, const T* w, long K, O* out, long ldc, const O* bias, long panel, long last, long N) {
  switch (R) {
#define CASE(n) case n: return rows_group<T, O, n>(a, lda, w, K, out, ldc, bias, panel, last, N);
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
}

// Several weights on the same rows, in one parallel region.
template <typename T, typename O>
static void gemm(const T* a, long lda, long M, long K, const Weight* weights, int count, int threads) {
  double work = 0;
  for (int n = 0; n < count; ++n) work += (double)M * K * weights[n].N;
  threads = (int)std::max(1L, std::min<long>(threads, work / 5e5));  // waking others costs more than a little work
  struct Task { int weight; long row, rows, panel, last; };
  std::vector<Task> tasks;
  long parts = (M + ROWS - 1) / ROWS, blocks = (parts + BLOCK - 1) / BLOCK;
  for (int n = 0; n < count; ++n) {
    long panels = (weights[n].N + PANEL - 1) / PANEL;
    long least = parts > 1 ? 1 : M <= 2 ? GROUP : M <= 6 ? 2 : 1;  // panels that one pass over the rows takes
    long group = blocks > 1 ? GROUP : std::max(least, panels / (4 * threads) / least * least);
    for (long b = 0; b < blocks; ++b)
      for (long p = 0; p < panels; p += group)
        tasks.push_back({n, M * b / blocks, M * (b + 1) / blocks - M * b / blocks, p, std::min(p + group, panels)});
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (size_t n = 0; n < tasks.size(); ++n) {
    const Task& task = tasks[n];
    const Weight& weight = weights[task.weight];
    long parts = (task.rows + ROWS - 1) / ROWS, few = parts > 1 ? 1 : task.last - task.panel;
    for (long panel = task.panel; panel < task.last; panel += few)
      for (long part = 0; part < parts; ++part) {
        long first = task.rows * part / parts, next = task.rows * (part + 1) / parts;
        long row = task.row + first;
        rows_any<T, O>(next - first, a + row * lda, lda, (const T*)weight.packed, K, (O*)weight.out + row * weight.ldc,
                       weight.ldc, (const O*)weight.bias, panel, std::min(panel + few, task.last), weight.N);
      }
  }
}

// Panels of 32 columns: [panel][k][column], for bfloat16 [panel][k / 2][column][k % 2]; what lies outside is 0.
template <typename S, typename T> static void pack(const S* w, T* out, long N, long K, int threads) {
  long panels = (N + PANEL - 1) / PANEL, width = stride(out), size = panel_size(out, K), some = 16 * width;
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
