// Sixteen floats at a time, in the compiler's own vector types: AVX-512 where there is one, halves or quarters elsewhere.
// Every reduction has one fixed order, so that a row's result never depends on its neighbours or on the threads.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t w16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
struct bf16 { uint16_t bits; };

static inline v16 load(const float* p) { v16 x; memcpy(&x, p, 64); return x; }
static inline v16 load(const bf16* p) {
  h16 h; memcpy(&h, p, 32);
  return (v16)(__builtin_convertvector(h, w16) << 16);
}
static inline void store(float* p, v16 x) { memcpy(p, &x, 64); }
static inline w16 rounded(v16 x) {  // to nearest, ties to even; a nan stays one
  w16 u = (w16)x;
  w16 r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (x != x) ? (w16{} + 0x7fc0) : r;
}
static inline void store(bf16* p, v16 x) { h16 h = __builtin_convertvector(rounded(x), h16); memcpy(p, &h, 32); }
static inline v16 same(float x) { return v16{} + x; }
static inline float get(float x) { return x; }
static inline float get(bf16 x) { uint32_t u = (uint32_t)x.bits << 16; float f; memcpy(&f, &u, 4); return f; }
static inline void put(float* p, float x) { *p = x; }
static inline void put(bf16* p, float x) {
  uint32_t u; memcpy(&u, &x, 4);
  p->bits = x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
template <typename T> static inline v16 as(v16 x);  // what storing and loading would leave of it
template <> inline v16 as<float>(v16 x) { return x; }
template <> inline v16 as<bf16>(v16 x) { return (v16)(rounded(x) << 16); }

static inline v16 highest(v16 a, v16 b) { return a > b ? a : b; }
static inline float sum(v16 x) {
  float a[16]; memcpy(a, &x, 64);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) a[i] += a[i + width];
  return a[0];
}
static inline v16 root(v16 x) {
#ifdef __AVX512F__
  return (v16)_mm512_sqrt_ps((__m512)x);
#else
  for (int i = 0; i < 16; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}
static inline float highest(v16 x) {
  float best = x[0];
  for (int i = 1; i < 16; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// exp of 16 numbers, within 2 units in the last place; below -87 it is 0.
static inline v16 exponential(v16 x) {
  i16 gone = x < -87.0f;
  x = x > 88.0f ? same(88.0f) : x;
  x = gone ? same(-87.0f) : x;
  v16 n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  v16 f = x - n * 0.693359375f;
  f = f - n * -2.12194440e-4f;
  v16 p = same(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  v16 y = p * (f * f) + f + 1.0f;
  i16 e = (__builtin_convertvector(n, i16) + 127) << 23;
  y = y * (v16)e;
  return gone ? v16{} : y;
}

// Memory that a thread keeps from call to call.
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
