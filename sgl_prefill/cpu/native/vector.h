// Vector types over GCC's and Clang's vector extensions: one source for all kinds of processor. The compile flags select the
// width; only the functions with an #if use instructions by name.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__)
#pragma GCC diagnostic push  // GCC warns of registers that its own header leaves undefined on purpose
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define INLINE inline __attribute__((always_inline))

namespace SGL_PREFILL_BUILD {

constexpr int WIDTH = VECTOR_BYTES / 4;  // float32 lanes of a vector
typedef float Floats __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

// Aligned memory; `at` is null if allocation failed. Not a std::vector<float>: all builds would share that name, and the linker
// may keep the code of a build that this processor cannot run.
struct Buffer {
  char* at;
  explicit Buffer(size_t bytes) : at((char*)std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
  ~Buffer() { std::free(at); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

INLINE Floats load(const float* from) { return *(const Floats*)from; }
INLINE void store(float* to, Floats x) { *(Floats*)to = x; }
INLINE Floats all(float x) { return Floats{} + x; }
INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

INLINE float widen(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
INLINE float widen(float x) { return x; }

INLINE Floats load(const bf16* from) { return (Floats)(__builtin_convertvector(*(const Halves*)from, Words) << 16); }

// Rounds to nearest, ties to even; a NaN stays NaN.
INLINE void store(bf16* to, Floats x) {
#if defined(__AVX512BF16__)
  *(__m256i_u*)to = (__m256i)_mm512_cvtneps_pbh((__m512)x);
#else
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *(Halves*)to = __builtin_convertvector(x == x ? rounded : (bits >> 16) | 0x40, Halves);
#endif
}
INLINE void store_one(bf16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to->bits = (uint16_t)(x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (bits >> 16) | 0x40);
}
INLINE void store_one(float* to, float x) { *to = x; }

// 2^x with a relative error of 3e-6; ROUGH: of 8e-5, a thirtieth of bfloat16's. Far below -126 the result is 0 or 2^-126, far
// above 126 infinity or at least 2^126.
template <bool ROUGH = false>
INLINE Floats exp2_of(Floats x) {
#if defined(__AVX512F__)
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = smaller(larger(x, all(-126.0f)), all(126.0f));
  const Floats magic = all(0x1.8p23f);  // adding it leaves no bits for a fraction
  const Floats n = (x + magic) - magic;
#endif
  const Floats f = x - n;
  Floats p;
  if constexpr (ROUGH) {
    p = all(0x1.c3f75cp-5f) * f + all(0x1.f0de1ap-3f);
    p = p * f + all(0x1.62f31ap-1f);
    p = p * f + all(0x1.fff692p-1f);
  } else {
    p = all(0x1.3a95f4p-7f) * f + all(0x1.ca123ap-5f);
    p = p * f + all(0x1.ec017ap-3f);
    p = p * f + all(0x1.62e0e2p-1f);
    p = p * f + all(1.0f);
  }
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return (Floats)((Ints)p + (__builtin_convertvector(n, Ints) << 23));
#endif
}

// 1 / x for normal numbers, with a relative error of 1e-7.
INLINE Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  const Floats rough = (Floats)_mm512_rcp14_ps((__m512)x);
  return rough * (2.0f - x * rough);
#else
  return 1.0f / x;
#endif
}

INLINE float sum_of(Floats x) {
  float total = 0;
  for (int i = 0; i < WIDTH; ++i) total += x[i];
  return total;
}

// Transposes WIDTH x WIDTH words.
#if defined(__AVX512F__)
inline void transpose(Words (&x)[WIDTH]) {
  __m512i t[16], u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32((__m512i)x[i], (__m512i)x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(u[i], u[i + 4], 0x88), b = _mm512_shuffle_i32x4(u[i], u[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(u[i + 8], u[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(u[i + 8], u[i + 12], 0xdd);
    x[i] = (Words)_mm512_shuffle_i32x4(a, c, 0x88);
    x[i + 4] = (Words)_mm512_shuffle_i32x4(b, d, 0x88);
    x[i + 8] = (Words)_mm512_shuffle_i32x4(a, c, 0xdd);
    x[i + 12] = (Words)_mm512_shuffle_i32x4(b, d, 0xdd);
  }
}
#else
inline void transpose(Words (&x)[WIDTH]) {
  uint32_t in[WIDTH][WIDTH], out[WIDTH][WIDTH];
  std::memcpy(in, x, sizeof(x));
  for (int i = 0; i < WIDTH; ++i)
    for (int j = 0; j < WIDTH; ++j) out[j][i] = in[i][j];
  std::memcpy(x, out, sizeof(x));
}
#endif

}  // namespace SGL_PREFILL_BUILD
