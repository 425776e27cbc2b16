// Sixteen floats at a time (`v16`), as one, two or four registers of the target's instruction set.
// Invariant: a row's result never depends on its neighbours, on the threads, or on what a compiler fuses. So every
// reduction has one fixed order, and every multiply-add is written as one (build with -ffp-contract=off).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// The only place that chooses width and registers of an instruction set. Trap: a vector type wider than the machine's
// registers is legal C++ and was 30 times slower, because the compiler keeps all of its parts in memory.
#if defined(__AVX512F__)
enum { LANES = 16, REGISTERS = 32 };
#if defined(__AVX512BF16__)
#define INSTRUCTION_SET "avx512-bf16"
#else
#define INSTRUCTION_SET "avx512"
#endif
#elif defined(__AVX2__) && defined(__FMA__)
enum { LANES = 8, REGISTERS = 16 };
#define INSTRUCTION_SET "avx2"
#elif defined(__aarch64__)
enum { LANES = 4, REGISTERS = 32 };
#define INSTRUCTION_SET "neon"
#else  // no multiply-add
enum { LANES = 4, REGISTERS = 16 };
#define INSTRUCTION_SET "sse4.2"
#endif

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_SOME _Pragma("clang loop unroll_count(4)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_SOME _Pragma("GCC unroll 4")
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
struct bf16 { uint16_t bits; };

// One register.
INLINE vec all(float x) { return x - vec{}; }  // not vec{} + x: that is an addition, since it changes -0
INLINE vec load_vec(const float* p) { vec x; memcpy(&x, p, sizeof x); return x; }
INLINE vec load_vec(const bf16* p) {
#if defined(__AVX512F__)
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(__SSE4_1__)
  return (vec)_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)p)), 16);
#else
  halves h; memcpy(&h, p, sizeof h);
  return (vec)(__builtin_convertvector(h, words) << 16);
#endif
}
INLINE words rounded(vec x) {  // to bfloat16's nearest, ties to even, in the low half; a nan stays one
  words u = (words)x;
  words r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (x != x) ? (words{} + 0x7fc0) : r;
}
INLINE void store_vec(float* p, vec x) { memcpy(p, &x, sizeof x); }
INLINE void store_vec(bf16* p, vec x) { halves h = __builtin_convertvector(rounded(x), halves); memcpy(p, &h, sizeof h); }
INLINE vec madd(vec x, vec y, vec sum) {  // x * y + sum
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#elif defined(__aarch64__)
  return (vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
#else
  return x * y + sum;
#endif
}
INLINE vec root(vec x) {
#if defined(__AVX512F__)
  return (vec)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vec)_mm256_sqrt_ps((__m256)x);
#elif defined(__aarch64__)
  return (vec)vsqrtq_f32((float32x4_t)x);
#elif defined(__x86_64__)
  return (vec)_mm_sqrt_ps((__m128)x);
#else
  for (int i = 0; i < LANES; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}
INLINE vec highest(vec a, vec b) { return a > b ? a : b; }
INLINE vec where_positive(vec x, vec y) { return x > 0.0f ? y : vec{}; }  // y where x > 0, else 0

// exp, within 2 units in the last place; exactly 0 below -87, so that masked positions (-inf) have weight 0. n is the
// nearest integer to x / ln 2 (adding and subtracting 1.5 * 2^23 rounds), f the remainder with ln 2 in two parts, and
// the polynomial is Cephes' expf.
INLINE vec exponential(vec x) {
  ints gone = x < -87.0f;
  x = x > 88.0f ? all(88.0f) : x;
  x = gone ? all(-87.0f) : x;
  vec n = madd(x, all(1.44269504f), all(12582912.0f)) - 12582912.0f;
  vec f = madd(n, all(-0.693359375f), x);
  f = madd(n, all(2.12194440e-4f), f);
  vec p = all(1.9875691500e-4f);
  p = madd(p, f, all(1.3981999507e-3f));
  p = madd(p, f, all(8.3334519073e-3f));
  p = madd(p, f, all(4.1665795894e-2f));
  p = madd(p, f, all(1.6666665459e-1f));
  p = madd(p, f, all(5.0000001201e-1f));
  vec y = madd(p, f * f, f) + 1.0f;
  ints e = (__builtin_convertvector(n, ints) + 127) << 23;
  y = y * (vec)e;
  return gone ? vec{} : y;
}

// Sixteen numbers: a binary tree of registers, without loops and arrays, which would keep compilers from using
// registers.
template <int N> struct Wide { Wide<N / 2> low, high; };
template <> struct Wide<1> { vec one; };
typedef Wide<16 / LANES> v16;

template <typename F> INLINE Wide<1> each(F f, Wide<1> a) { return {f(a.one)}; }
template <typename F> INLINE Wide<1> each(F f, Wide<1> a, Wide<1> b) { return {f(a.one, b.one)}; }
template <typename F> INLINE Wide<1> each(F f, Wide<1> a, Wide<1> b, Wide<1> c) { return {f(a.one, b.one, c.one)}; }
template <typename F, int N> INLINE Wide<N> each(F f, Wide<N> a) { return {each(f, a.low), each(f, a.high)}; }
template <typename F, int N> INLINE Wide<N> each(F f, Wide<N> a, Wide<N> b) {
  return {each(f, a.low, b.low), each(f, a.high, b.high)};
}
template <typename F, int N> INLINE Wide<N> each(F f, Wide<N> a, Wide<N> b, Wide<N> c) {
  return {each(f, a.low, b.low, c.low), each(f, a.high, b.high, c.high)};
}
template <typename T> INLINE void fill(Wide<1>& x, const T* p) { x.one = load_vec(p); }
template <typename T, int N> INLINE void fill(Wide<N>& x, const T* p) { fill(x.low, p), fill(x.high, p + N / 2 * LANES); }
template <typename T> INLINE void spill(T* p, Wide<1> x) { store_vec(p, x.one); }
template <typename T, int N> INLINE void spill(T* p, Wide<N> x) { spill(p, x.low), spill(p + N / 2 * LANES, x.high); }

template <typename T> INLINE v16 load(const T* p) { v16 x; fill(x, p); return x; }
template <typename T> INLINE void store(T* p, v16 x) { spill(p, x); }
INLINE v16 same(float x) { return each([x](vec) { return all(x); }, v16{}); }
#define ELEMENTWISE(op) \
  INLINE v16 operator op(v16 a, v16 b) { return each([](vec x, vec y) { return x op y; }, a, b); } \
  INLINE v16 operator op(v16 a, float b) { return each([b](vec x) { return x op b; }, a); } \
  INLINE v16 operator op(float a, v16 b) { return each([a](vec x) { return a op x; }, b); }
ELEMENTWISE(+) ELEMENTWISE(-) ELEMENTWISE(*) ELEMENTWISE(/)
#undef ELEMENTWISE
INLINE v16 operator-(v16 a) { return each([](vec x) { return -x; }, a); }
INLINE v16 madd(v16 x, v16 y, v16 sum) { return each([](vec a, vec b, vec c) { return madd(a, b, c); }, x, y, sum); }
INLINE v16 madd(v16 x, float y, v16 sum) { return madd(x, same(y), sum); }
INLINE v16 root(v16 a) { return each([](vec x) { return root(x); }, a); }
INLINE v16 exponential(v16 a) { return each([](vec x) { return exponential(x); }, a); }
INLINE v16 highest(v16 a, v16 b) { return each([](vec x, vec y) { return highest(x, y); }, a, b); }
INLINE v16 where_positive(v16 a, v16 b) { return each([](vec x, vec y) { return where_positive(x, y); }, a, b); }
template <typename T> inline v16 as(v16 x);  // the value after storing and loading it in this type
template <> inline v16 as<float>(v16 x) { return x; }
template <> inline v16 as<bf16>(v16 x) { return each([](vec y) { return (vec)(rounded(y) << 16); }, x); }

// Reductions: 16 numbers to 8, 4, 2, 1, in this order on every instruction set (LANES must not change a result).
INLINE float sum(v16 x) {
  float a[16]; store(a, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) a[i] += a[i + width];
  return a[0];
}
INLINE float highest(v16 x) {
  float a[16]; store(a, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
  return a[0];
}

// One number.
static inline float get(float x) { return x; }
static inline float get(bf16 x) { uint32_t u = (uint32_t)x.bits << 16; float f; memcpy(&f, &u, 4); return f; }
static inline void put(float* p, float x) { *p = x; }
static inline void put(bf16* p, float x) {
  uint32_t u; memcpy(&u, &x, 4);
  p->bits = x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// Memory that a thread keeps between calls; its contents are undefined.
struct Scratch {
  float* data = nullptr;
  size_t size = 0;
  float* need(size_t count) {
    if (count > size) {
      free(data);
      size = count + count / 4;
      data = (float*)aligned_alloc(64, (size * 4 + 63) / 64 * 64);
    }
    return data;
  }
  ~Scratch() { free(data); }
};
