// Formats: the packed layouts of queries, keys, values and probabilities, and the two matrix products on them.
//
//     scores      s[key, row]   = sum over dims of k[key, dim] * q[dim, row]      for KEYS keys
//     accumulate  o[dim, row]  += sum over keys of v[key, dim] * p[key, row]
//
// LANES      rows of a row group
// KEYS       keys of one step
// TILE_KEYS  keys that are packed at once
// PER_WORD   numbers in a word, the unit of packed data: 1 float32 or 2 bfloat16
// IS_PACKED  consecutive rows in memory already have the layout of packed keys
//
// Wide<T>   float32 products; bfloat16 is widened where it is packed
// Pairs     bfloat16 products in pairs (avx512_bf16)
// Tiles     bfloat16 products of 16 x 32 x 16 (AMX)
#pragma once
#include <algorithm>

#include "vector.h"

#define INLINE_LAMBDA __attribute__((always_inline))

namespace SGL_PREFILL_BUILD {

// A register tile of `Broadcast`: RT keys or dims x REGISTERS vectors of rows.
constexpr int REGISTERS = VECTOR_BYTES == 64 ? 4 : 2;
constexpr int RT = 6;

// c[i][j] += sum over k of a[i * a_row + k * a_step] * b[k][WIDTH * j ...]
template <int M, int NR, class Word, class Multiply>
INLINE void multiply(Floats (&c)[M][NR], const Word* a, int64_t a_row, int64_t a_step, const Word* b, int lanes, int steps,
                     const Multiply& multiply_add) {
#pragma GCC unroll 1
  for (int k = 0; k < steps; ++k, a += a_step, b += lanes)
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < NR; ++j) c[i][j] = multiply_add(c[i][j], a[i * a_row], b + WIDTH * j);
}

// Both products by a multiply-add of one broadcast word and a vector of words.
template <class F, class Word>
struct Broadcast {
  template <int NR>
  static void scores(float* s, const Word* k, int key, const Word* q, int dim) {
    const int words = dim / F::PER_WORD;
    k += (int64_t)key * words;
    for (int i = 0; i < F::KEYS; i += RT, k += RT * words) {
      Floats c[RT][NR] = {};
      multiply<RT, NR>(c, k, words, 1, q, F::LANES, words, F::multiply_add);
#pragma GCC unroll 8
      for (int r = 0; r < RT; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < NR; ++j) store(s + (i + r) * F::LANES + WIDTH * j, c[r][j]);
    }
  }

  template <int M, int NR>
  INLINE static void accumulate_dims(float* o, const Word* v, int dim, const Word* p, int steps) {
    Floats c[M][NR];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < NR; ++j) c[i][j] = load(o + i * F::LANES + WIDTH * j);
    multiply<M, NR>(c, v, 1, dim, p, F::LANES, steps, F::multiply_add);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < NR; ++j) store(o + i * F::LANES + WIDTH * j, c[i][j]);
  }

  template <int NR>
  static void accumulate(float* o, const Word* v, const Word* p, int key, int n_keys, int dim) {
    v += (int64_t)key / F::PER_WORD * dim;
    const int steps = (n_keys + F::PER_WORD - 1) / F::PER_WORD;
    int d = 0;
    for (; d + RT <= dim; d += RT) accumulate_dims<RT, NR>(o + d * F::LANES, v + d, dim, p, steps);
    for (; d + 4 <= dim; d += 4) accumulate_dims<4, NR>(o + d * F::LANES, v + d, dim, p, steps);
    for (; d < dim; d += 2) accumulate_dims<2, NR>(o + d * F::LANES, v + d, dim, p, steps);
  }

  static void begin() {}
  static void end() {}
};

template <class T>
struct Wide : Broadcast<Wide<T>, float> {
  using Element = T;
  using Word = float;
  static constexpr int PER_WORD = 1, LANES = REGISTERS * WIDTH, KEYS = 4 * RT, TILE_KEYS = 10 * KEYS;
  static constexpr bool IS_PACKED = sizeof(T) == 4;
  static int padded(int dim) { return dim; }
  struct MultiplyAdd {
    INLINE Floats operator()(Floats c, float a, const float* b) const { return a * load(b) + c; }
  };
  static constexpr MultiplyAdd multiply_add{};

  // WIDTH rows become lanes: [dim][LANES]
  static void pack_queries(float* to, const T* const (&rows)[WIDTH], int dim) {
    for (int d = 0; d < dim; ++d)
      for (int i = 0; i < WIDTH; ++i) to[d * LANES + i] = widen(rows[i][d]);
  }
  static void pack_keys(float* to, const T* from, int64_t stride, const int32_t* slots, int n, int dim) {
    int i = 0;
    for (; i < n; ++i, to += dim) copy(to, from + slots[i] * stride, dim);
    for (; i % KEYS; ++i, to += dim) std::fill(to, to + dim, 0.0f);
  }
  static void pack_values(float* to, const T* from, int64_t stride, const int32_t* slots, int n, int dim) {
    for (int i = 0; i < n; ++i, to += dim) copy(to, from + slots[i] * stride, dim);
  }
  INLINE static void copy(float* to, const T* from, int dim) {
    int d = 0;
    for (; d + WIDTH <= dim; d += WIDTH) store(to + d, load(from + d));
    for (; d < dim; ++d) to[d] = widen(from[d]);
  }
  INLINE static Floats store_probabilities(float* p, Floats sum, Floats even, Floats) {
    store(p, even);
    return sum + even;
  }
};

#if defined(__AVX512BF16__)
// Stores the pairs (even[i], odd[i]) in bfloat16. Returns sum + even + odd of the rounded numbers, so that probabilities add up
// to 1.
INLINE Floats store_pairs(uint32_t* p, Floats sum, Floats even, Floats odd) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  const __m512i pairs = _mm512_permutexvar_epi16(_mm512_load_si512(order), both);
  _mm512_store_si512(p, pairs);
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(0x3f803f80));  // times 1
}

INLINE __mmask32 first_lanes(int n) { return n >= 32 ? 0xffffffff : n <= 0 ? 0 : (1u << n) - 1; }

// WIDTH rows become lanes of [dims / 2][lanes] pairs of dims.
template <int LANES>
void pack_query_pairs(uint32_t* to, const bf16* const (&rows)[WIDTH], int dim, int padded_dim) {
  for (int d = 0; d < padded_dim; d += 2 * WIDTH) {
    const int steps = std::min(padded_dim - d, 2 * WIDTH) / 2;
    const __mmask32 mask = first_lanes(dim - d);
    Words x[WIDTH];
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i) x[i] = (Words)_mm512_maskz_loadu_epi16(mask, rows[i] + d);
    transpose(x);
    for (int i = 0; i < steps; ++i, to += LANES) *(Words*)to = x[i];
  }
}

INLINE void pack_key_rows(bf16* to, const bf16* from, int64_t stride, const int32_t* slots, int n, int n_padded, int dim,
                          int padded_dim) {
  int i = 0;
  for (; i < n; ++i, to += padded_dim) {
    const bf16* row = from + slots[i] * stride;
    if (i + 8 < n) __builtin_prefetch(from + slots[i + 8] * stride);
    for (int d = 0; d < padded_dim; d += 32) {
      const __mmask32 here = first_lanes(padded_dim - d);
      _mm512_mask_storeu_epi16(to + d, here, _mm512_maskz_loadu_epi16(first_lanes(dim - d), row + d));
    }
  }
  if (i < n_padded) std::memset((void*)to, 0, 2ul * (n_padded - i) * padded_dim);
}
#endif

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
struct Pairs : Broadcast<Pairs, uint32_t> {
  using Element = bf16;
  using Word = uint32_t;
  static constexpr int PER_WORD = 2, LANES = REGISTERS * WIDTH, KEYS = 4 * RT, TILE_KEYS = 10 * KEYS;
  static constexpr bool IS_PACKED = true;
  static int padded(int dim) { return dim; }
  struct MultiplyAdd {
    INLINE Floats operator()(Floats c, uint32_t a, const uint32_t* b) const {
      return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32(a), (__m512bh)_mm512_loadu_si512(b));
    }
  };
  static constexpr MultiplyAdd multiply_add{};

  static void pack_queries(uint32_t* to, const bf16* const (&rows)[WIDTH], int dim) {
    pack_query_pairs<LANES>(to, rows, dim, dim);
  }
  static void pack_keys(uint32_t* to, const bf16* from, int64_t stride, const int32_t* slots, int n, int dim) {
    pack_key_rows((bf16*)to, from, stride, slots, n, (n + KEYS - 1) / KEYS * KEYS, dim, dim);
  }
  // [keys / 2][dims] pairs of keys
  static void pack_values(uint32_t* to, const bf16* from, int64_t stride, const int32_t* slots, int n, int dim) {
    for (int i = 0; i < n; i += 2, to += dim) {
      const bf16 *even = from + slots[i] * stride, *odd = i + 1 < n ? from + slots[i + 1] * stride : nullptr;
      int d = 0;
      for (; d + WIDTH <= dim; d += WIDTH) {
        const Words low = __builtin_convertvector(*(const Halves*)(even + d), Words);
        const Words high = odd ? __builtin_convertvector(*(const Halves*)(odd + d), Words) : Words{};
        *(Words*)(to + d) = low | (high << 16);
      }
      for (; d < dim; ++d) to[d] = even[d].bits | (odd ? (uint32_t)odd[d].bits << 16 : 0);
    }
  }
  INLINE static Floats store_probabilities(uint32_t* p, Floats sum, Floats even, Floats odd) {
    return store_pairs(p, sum, even, odd);
  }
};
using Narrow = Pairs;

#elif defined(__AMX_BF16__)
// AMX has 8 tile registers of 16 x 64 bytes. Low and high: the first and the second 16 of 32 rows, dims or outputs.
//
// Register | scores                | accumulate              | product_block (products.h)
// 0        | s, rows low           | o, dims low,  rows low  | out, rows low,  outputs low
// 1        | s, rows high          | o, dims high, rows low  | out, rows low,  outputs high
// 2        |                       | o, dims low,  rows high | out, rows high, outputs low
// 3        |                       | o, dims high, rows high | out, rows high, outputs high
// 4        | k, 16 keys            | v, dims low             | x, rows low
// 5        | q, rows low           | v, dims high            | x, rows high
// 6        | q, rows high          | p, rows low             | weights, outputs low
// 7        |                       | p, rows high            | weights, outputs high
struct Tiles {
  using Element = bf16;
  using Word = uint32_t;
  static constexpr int PER_WORD = 2, LANES = 32, KEYS = 32, TILE_KEYS = 8 * KEYS, TILE_WORDS = 256;
  static constexpr bool IS_PACKED = true;
  static int padded(int dim) { return (dim + 31) / 32 * 32; }

  static void begin() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

  static void pack_queries(uint32_t* to, const bf16* const (&rows)[WIDTH], int dim) {
    pack_query_pairs<LANES>(to, rows, dim, padded(dim));
  }

  static void pack_keys(uint32_t* to, const bf16* from, int64_t stride, const int32_t* slots, int n, int dim) {
    pack_key_rows((bf16*)to, from, stride, slots, n, (n + KEYS - 1) / KEYS * KEYS, dim, padded(dim));
  }

  // V transposed: [keys / 32][dims / 16] tiles of [16 dims][32 keys].
  static void pack_values(uint32_t* to, const bf16* from, int64_t stride, const int32_t* slots, int n, int dim) {
    alignas(64) static const uint16_t first[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                                   8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low_half = _mm512_load_si512(first), high_half = _mm512_add_epi16(low_half, _mm512_set1_epi16(16));
    for (int i = 0; i < n; i += 32)
      for (int d = 0; d < padded(dim); d += 32, to += 2 * TILE_WORDS) {
        const __mmask32 mask = first_lanes(dim - d);
        Words low[16], high[16];
        const auto row = [&](int key) {
          return key < n ? _mm512_maskz_loadu_epi16(mask, from + slots[key] * stride + d) : _mm512_setzero_si512();
        };
#pragma GCC unroll 16
        for (int k = 0; k < 16; ++k) {
          const __m512i even = row(i + 2 * k), odd = row(i + 2 * k + 1);
          low[k] = (Words)_mm512_permutex2var_epi16(even, low_half, odd);
          high[k] = (Words)_mm512_permutex2var_epi16(even, high_half, odd);
        }
        transpose(low);
        transpose(high);
#pragma GCC unroll 16
        for (int k = 0; k < 16; ++k) *(Words*)(to + 16 * k) = low[k], *(Words*)(to + TILE_WORDS + 16 * k) = high[k];
      }
  }

  // GCC's tile loads do not declare that they read memory: this makes the compiler finish its stores first.
  INLINE static void in_memory() { asm volatile("" ::: "memory"); }

  template <int NR>
  INLINE static void scores(float* s, const uint32_t* k, int key, const uint32_t* q, int dim) {
    in_memory();
    const int words = dim / 2;
    k += (int64_t)key * words;
    for (int half = 0; half < KEYS; half += 16, k += 16 * words, s += 16 * LANES) {
      _tile_zero(0);
      if (NR == 2) _tile_zero(1);
      for (int d = 0; d < words; d += 16) {
        _tile_loadd(4, k + d, 4 * words);
        _tile_loadd(5, q + d * LANES, 4 * LANES);
        _tile_dpbf16ps(0, 4, 5);
        if (NR == 2) {
          _tile_loadd(6, q + d * LANES + 16, 4 * LANES);
          _tile_dpbf16ps(1, 4, 6);
        }
      }
      _tile_stored(0, s, 4 * LANES);
      if (NR == 2) _tile_stored(1, s + 16, 4 * LANES);
    }
  }

  template <int NR>
  INLINE static void accumulate(float* o, const uint32_t* v, uint32_t* p, int key, int n_keys, int dim) {
    const int steps = (n_keys + KEYS - 1) / KEYS;
    // Behind the last key the values are zero. The probabilities must be zero too: 0 * NaN is NaN.
    for (int i = (n_keys + 1) / 2; i < steps * KEYS / 2; ++i) std::memset(p + i * LANES, 0, 4 * LANES);
    in_memory();
    v += (int64_t)key / KEYS * (dim / 16) * TILE_WORDS;
    for (int d = 0; d < dim; d += 32, o += 32 * LANES, v += 2 * TILE_WORDS) {
      _tile_loadd(0, o, 4 * LANES);
      _tile_loadd(1, o + 16 * LANES, 4 * LANES);
      if (NR == 2) {
        _tile_loadd(2, o + 16, 4 * LANES);
        _tile_loadd(3, o + 16 * LANES + 16, 4 * LANES);
      }
      const uint32_t *a = v, *b = p;
      for (int i = 0; i < steps; ++i, a += (dim / 16) * TILE_WORDS, b += KEYS / 2 * LANES) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 4 * LANES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, a + TILE_WORDS, 64);
        _tile_dpbf16ps(1, 5, 6);
        if (NR == 2) {
          _tile_loadd(7, b + 16, 4 * LANES);
          _tile_dpbf16ps(2, 4, 7);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, o, 4 * LANES);
      _tile_stored(1, o + 16 * LANES, 4 * LANES);
      if (NR == 2) {
        _tile_stored(2, o + 16, 4 * LANES);
        _tile_stored(3, o + 16 * LANES + 16, 4 * LANES);
      }
    }
  }
  INLINE static Floats store_probabilities(uint32_t* p, Floats sum, Floats even, Floats odd) {
    return store_pairs(p, sum, even, odd);
  }
};
using Narrow = Tiles;

#else
using Narrow = Wide<bf16>;
#endif

}  // namespace SGL_PREFILL_BUILD
