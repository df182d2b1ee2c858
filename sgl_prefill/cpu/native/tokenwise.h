// Kernels that treat each token by itself, in one pass over memory: RMSNorm with residual, gated activations, rotary embedding,
// storing K and V; and the logits of a few rows in float32.
#pragma once
#include <omp.h>

#include "attention.h"

namespace SGL_PREFILL_BUILD {

constexpr int64_t ELEMENTS_A_THREAD = 16384;  // at least

INLINE int threads_for(int64_t elements, int threads) {
  return (int)std::max<int64_t>(std::min<int64_t>(threads, elements / ELEMENTS_A_THREAD), 1);
}

// out = norm(x + residual) * (offset + weight), residual = x + residual; a null residual counts as 0. As in SGLang's layers, the
// sum is rounded to T before it is normalized if the offset is not 0 (Gemma).
template <class T>
int rms_norm_of(T* out, const T* x, int64_t x_row, T* residual, const T* weight, float offset, float eps, int64_t rows,
                int64_t columns, int threads) {
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(threads_for(rows * columns, threads))
  {
    Buffer memory(4 * columns);
    if (memory.at == nullptr) failed = true;
    float* sum = (float*)memory.at;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      if (failed) continue;
      const T* from = x + row * x_row;
      T* kept = residual ? residual + row * columns : nullptr;
      Floats squares = {};
      float rest = 0;
      int64_t i = 0;
      for (; i + WIDTH <= columns; i += WIDTH) {
        Floats value = load(from + i);
        if (kept) {
          value += load(kept + i);
          store(kept + i, value);
          if (offset != 0) value = load(kept + i);
        }
        squares += value * value;
        store(sum + i, value);
      }
      for (; i < columns; ++i) {
        float value = widen(from[i]);
        if (kept) {
          value += widen(kept[i]);
          store_one(kept + i, value);
          if (offset != 0) value = widen(kept[i]);
        }
        rest += value * value;
        sum[i] = value;
      }
      const float scale = 1 / std::sqrt((sum_of(squares) + rest) / columns + eps);
      T* to = out + row * columns;
      for (i = 0; i + WIDTH <= columns; i += WIDTH) store(to + i, load(sum + i) * scale * (load(weight + i) + offset));
      for (; i < columns; ++i) store_one(to + i, sum[i] * scale * (widen(weight[i]) + offset));
    }
  }
  return failed ? NO_MEMORY : DONE;
}

int rms_norm(void* out, const void* x, int64_t x_row, void* residual, const void* weight, float offset, float eps, int64_t rows,
             int64_t columns, int32_t is_float32, int32_t threads) {
  if (is_float32)
    return rms_norm_of((float*)out, (const float*)x, x_row, (float*)residual, (const float*)weight, offset, eps, rows, columns,
                       threads);
  return rms_norm_of((bf16*)out, (const bf16*)x, x_row, (bf16*)residual, (const bf16*)weight, offset, eps, rows, columns,
                     threads);
}

enum Activation { SILU = 0, GELU_TANH = 1 };  // ACTIVATIONS of calls.py

INLINE Floats activated(Floats x, int kind) {
  // gelu(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
  const Floats inner = kind == SILU ? x : x * 1.5957691216057308f * (1.0f + 0.044715f * x * x);
  return x * reciprocal(1.0f + exp2_of(smaller(larger(inner * -LOG2_E, all(-120.0f)), all(120.0f))));
}

template <class T>
void gated_of(T* out, const T* gate_up, int64_t rows, int64_t columns, int kind, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(rows * columns, threads))
  for (int64_t row = 0; row < rows; ++row) {
    const T *gate = gate_up + 2 * row * columns, *up = gate + columns;
    T* to = out + row * columns;
    int64_t i = 0;
    for (; i + WIDTH <= columns; i += WIDTH) store(to + i, activated(load(gate + i), kind) * load(up + i));
    for (; i < columns; ++i) store_one(to + i, activated(all(widen(gate[i])), kind)[0] * widen(up[i]));
  }
}

// out = activation(gate) * up; gate_up: [rows, 2 * columns]
int gated(void* out, const void* gate_up, int64_t rows, int64_t columns, int32_t kind, int32_t is_float32, int32_t threads) {
  if (is_float32) gated_of((float*)out, (const float*)gate_up, rows, columns, kind, threads);
  else gated_of((bf16*)out, (const bf16*)gate_up, rows, columns, kind, threads);
  return DONE;
}

template <class T>
void rotate_of(T* x, int64_t x_row, int64_t x_head, const int64_t* positions, const float* cos_sin, int64_t rows, int heads,
               int rotary_dim, int is_neox, int threads) {
  const int half = rotary_dim / 2;
#pragma omp parallel for schedule(static) num_threads(threads_for(rows * heads * rotary_dim, threads))
  for (int64_t row = 0; row < rows; ++row) {
    const float *cos = cos_sin + positions[row] * rotary_dim, *sin = cos + half;
    for (int head = 0; head < heads; ++head) {
      T* at = x + row * x_row + head * x_head;
      int i = 0;
      if (is_neox)
        for (; i + WIDTH <= half; i += WIDTH) {
          const Floats one = load(at + i), other = load(at + half + i), c = load(cos + i), s = load(sin + i);
          store(at + i, one * c - other * s), store(at + half + i, other * c + one * s);
        }
      for (; i < half; ++i) {
        T *first = is_neox ? at + i : at + 2 * i, *second = is_neox ? at + half + i : at + 2 * i + 1;
        const float one = widen(*first), other = widen(*second);
        store_one(first, one * cos[i] - other * sin[i]), store_one(second, other * cos[i] + one * sin[i]);
      }
    }
  }
}

// Rotary embedding in place; cos_sin: [positions, rotary_dim], cosines first. is_neox: rotates halves, else neighbours.
int rotate(void* x, int64_t x_row, int64_t x_head, const int64_t* positions, const float* cos_sin, int64_t rows, int32_t heads,
           int32_t rotary_dim, int32_t is_neox, int32_t is_float32, int32_t threads) {
  if (is_float32) rotate_of((float*)x, x_row, x_head, positions, cos_sin, rows, heads, rotary_dim, is_neox, threads);
  else rotate_of((bf16*)x, x_row, x_head, positions, cos_sin, rows, heads, rotary_dim, is_neox, threads);
  return DONE;
}

// Copies row i of key and value to slot slots[i] of their pools.
int store_kv(void* key_pool, int64_t key_slot_bytes, void* value_pool, int64_t value_slot_bytes, const int64_t* slots,
             const void* key, int64_t key_stride_bytes, const void* value, int64_t value_stride_bytes, int64_t rows,
             int64_t key_bytes, int64_t value_bytes, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(rows * (key_bytes + value_bytes) / 4, threads))
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy((char*)key_pool + slots[row] * key_slot_bytes, (const char*)key + row * key_stride_bytes, key_bytes);
    std::memcpy((char*)value_pool + slots[row] * value_slot_bytes, (const char*)value + row * value_stride_bytes, value_bytes);
  }
  return DONE;
}

template <class F>
int logits_of(float* out, const typename F::Element* hidden, const typename F::Element* weight, int64_t rows, int64_t vocabulary,
              int64_t columns, int threads) {
  if (F::padded(columns) != columns) return REFUSED;
  std::atomic<bool> failed{false};
  const int64_t n_groups = (rows + F::LANES - 1) / F::LANES, words = columns / F::PER_WORD;
  Buffer queries(sizeof(typename F::Word) * n_groups * F::LANES * words);
  if (queries.at == nullptr) return NO_MEMORY;
  typename F::Word* q = (typename F::Word*)queries.at;
  for (int64_t row = 0; row < n_groups * F::LANES; row += WIDTH) {
    const typename F::Element* lanes[WIDTH];
    for (int i = 0; i < WIDTH; ++i) lanes[i] = hidden + std::min(row + i, rows - 1) * columns;
    F::pack_queries(q + row / F::LANES * F::LANES * words + row % F::LANES, lanes, columns);
  }
  const int64_t n_blocks = (vocabulary + F::KEYS - 1) / F::KEYS;
#pragma omp parallel num_threads(threads)
  {
    // Packed rows of the weight, where its own layout does not serve, and for the last KEYS rows.
    Buffer memory(sizeof(typename F::Word) * F::KEYS * words + 4 * F::KEYS * F::LANES);
    if (memory.at == nullptr) failed = true;
    float* s = (float*)memory.at;
    typename F::Word* packed = (typename F::Word*)(s + F::KEYS * F::LANES);
    F::begin();
#pragma omp for schedule(static)
    for (int64_t block = 0; block < n_blocks; ++block) {
      if (failed) continue;
      const int64_t first = block * F::KEYS, n = std::min<int64_t>(F::KEYS, vocabulary - first);
      const typename F::Word* k = (const typename F::Word*)(weight + first * columns);
      if (!F::IS_PACKED || n < F::KEYS) {
        int32_t slots[F::KEYS];
        for (int i = 0; i < n; ++i) slots[i] = i;
        F::pack_keys(packed, weight + first * columns, columns, slots, n, columns);
        k = packed;
      }
      for (int64_t group = 0; group < n_groups; ++group) {
        const int here = (int)std::min<int64_t>(F::LANES, rows - group * F::LANES);
        if (here <= WIDTH) F::template scores<1>(s, k, 0, q + group * F::LANES * words, columns);
        else F::template scores<F::LANES / WIDTH>(s, k, 0, q + group * F::LANES * words, columns);
        for (int lane = 0; lane < here; ++lane) {
          float* to = out + (group * F::LANES + lane) * vocabulary + first;
          for (int i = 0; i < n; ++i) to[i] = s[i * F::LANES + lane];
        }
      }
    }
    F::end();
  }
  return failed ? NO_MEMORY : DONE;
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
// Logits of ROWS rows for WIDTH / ROWS outputs. A row's sums have the same order for any number of rows.
template <int ROWS>
INLINE void dot_products(float* out, const bf16* hidden, const bf16* weight, int64_t rows, int64_t first, int64_t vocabulary,
                         int64_t columns) {
  constexpr int OUTPUTS = WIDTH / ROWS;
  const bf16 *x[ROWS], *w[OUTPUTS];
  for (int r = 0; r < ROWS; ++r) x[r] = hidden + std::min<int64_t>(r, rows - 1) * columns;
  for (int v = 0; v < OUTPUTS; ++v) w[v] = weight + std::min<int64_t>(first + v, vocabulary - 1) * columns;
  Floats sums[WIDTH] = {};
  for (int64_t d = 0; d < columns; d += 2 * WIDTH) {
    __m512bh q[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) q[r] = (__m512bh)_mm512_loadu_si512(x[r] + d);
#pragma GCC unroll 16
    for (int v = 0; v < OUTPUTS; ++v) {
      const __m512bh k = (__m512bh)_mm512_loadu_si512(w[v] + d);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) sums[v * ROWS + r] = (Floats)_mm512_dpbf16_ps((__m512)sums[v * ROWS + r], k, q[r]);
    }
  }
  Words across[WIDTH];
  for (int i = 0; i < WIDTH; ++i) across[i] = (Words)sums[i];
  transpose(across);
  Floats total = {};
  for (int i = 0; i < WIDTH; ++i) total += (Floats)across[i];
  for (int v = 0; v < OUTPUTS && first + v < vocabulary; ++v)
    for (int r = 0; r < ROWS && r < rows; ++r) out[r * vocabulary + first + v] = total[v * ROWS + r];
}

// As `logits_of`, for a multiple of 32 columns. One row takes the time to read the weight; `logits_of` computes LANES rows for it.
void logits_by_dot_products(float* out, const bf16* hidden, const bf16* weight, int64_t rows, int64_t vocabulary,
                            int64_t columns, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t block = 0; block < (vocabulary + WIDTH - 1) / WIDTH; ++block) {
    const int64_t first = block * WIDTH, end = std::min(first + WIDTH, vocabulary);
    for (int64_t row = 0; row < rows; row += 4) {
      const int64_t n = rows - row;
      float* to = out + row * vocabulary;
      const bf16* from = hidden + row * columns;
      if (n == 1) dot_products<1>(to, from, weight, n, first, vocabulary, columns);
      else if (n == 2)
        for (int64_t v = first; v < end; v += WIDTH / 2) dot_products<2>(to, from, weight, n, v, vocabulary, columns);
      else
        for (int64_t v = first; v < end; v += WIDTH / 4) dot_products<4>(to, from, weight, n, v, vocabulary, columns);
    }
  }
}
#endif

// hidden @ weight.T accumulated in float32; hidden: [rows, columns], weight: [vocabulary, columns], out: [rows, vocabulary]
int logits(float* out, const void* hidden, const void* weight, int64_t rows, int64_t vocabulary, int64_t columns,
           int32_t is_float32, int32_t threads) {
  if (columns % 2) return REFUSED;
  if (is_float32)
    return logits_of<Wide<float>>(out, (const float*)hidden, (const float*)weight, rows, vocabulary, columns, threads);
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  if (columns % (2 * WIDTH) == 0) {
    logits_by_dot_products(out, (const bf16*)hidden, (const bf16*)weight, rows, vocabulary, columns, threads);
    return DONE;
  }
#endif
  return logits_of<Narrow>(out, (const bf16*)hidden, (const bf16*)weight, rows, vocabulary, columns, threads);
}

}  // namespace SGL_PREFILL_BUILD
