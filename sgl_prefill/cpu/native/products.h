// Matrix products with the model's weights, out = x . W^T + bias, or activation(gate) * up of it; on processors with AMX only.
// Two things are faster than in oneDNN: steps of some 20 to 500 rows, where oneDNN uses half of the cores (for some row counts
// one thread), and the gate, which is applied before results are written to memory.
//
// Packed weights: blocks of 32 outputs; a block is [depth / 32] pairs of tiles of 16 outputs, contiguous in memory. With a gate,
// a block is 16 outputs of the gate and the same 16 of up.
#pragma once
#include "tokenwise.h"

namespace SGL_PREFILL_BUILD {

#if defined(__AMX_BF16__)
constexpr bool HAS_PRODUCTS = true;
constexpr int BLOCK = 32;                               // rows of x, or outputs
constexpr int64_t RANGE_BYTES = 1 << 20;                // rows of x that stay in a core's cache while all weights are read
constexpr int64_t LEAST_RANGE = 128, MOST_RANGE = 512;  // rows
constexpr int TASKS_A_THREAD = 4;

int pack_product(void* to_, const void* weight_, int64_t outputs, int64_t depth, int32_t has_gate, int32_t threads) {
  if (outputs % BLOCK || depth % 32) return REFUSED;
  const int64_t second = has_gate ? outputs / 2 : 16, step = has_gate ? 16 : BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t block = 0; block < outputs / BLOCK; ++block) {
    uint32_t* to = (uint32_t*)to_ + block * BLOCK * depth / 2;
    for (int64_t d = 0; d < depth / 2; d += 16)
      for (int64_t half = 0; half < 2; ++half, to += 256) {
        const uint32_t* from = (const uint32_t*)weight_ + (block * step + half * second) * (depth / 2) + d;
        Words tile[16];
        for (int i = 0; i < 16; ++i) tile[i] = *(const Words*)(from + i * (depth / 2));
        transpose(tile);
        for (int i = 0; i < 16; ++i) *(Words*)(to + 16 * i) = tile[i];
      }
  }
  return DONE;
}

// c[32][32] = x[up to 32 rows] . block of weights
template <bool BOTH>
INLINE void product_block(float* c, const bf16* x, int64_t x_row, const uint32_t* w, int64_t depth) {
  Tiles::in_memory();
  _tile_zero(0);
  _tile_zero(1);
  if (BOTH) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const bf16* x1 = x + 16 * x_row;
  for (int64_t d = 0; d < depth; d += 32, w += 512) {
    _tile_loadd(4, x + d, 2 * x_row);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 256, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (BOTH) {
      _tile_loadd(5, x1 + d, 2 * x_row);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, 4 * BLOCK);
  _tile_stored(1, c + 16, 4 * BLOCK);
  if (BOTH) {
    _tile_stored(2, c + 16 * BLOCK, 4 * BLOCK);
    _tile_stored(3, c + 16 * BLOCK + 16, 4 * BLOCK);
  }
  Tiles::in_memory();
}

// x: [rows, depth], rows of any stride; out: [rows, outputs], with a gate half as many columns; activation: negative without a
// gate.
int product(void* out_, const void* x_, int64_t x_row, const void* packed, const void* bias_, int64_t rows, int64_t outputs,
            int64_t depth, int32_t activation, int32_t threads) {
  if (outputs % BLOCK || depth % 32) return REFUSED;
  if (rows == 0) return DONE;
  const bf16 *x = (const bf16*)x_, *bias = (const bf16*)bias_;
  const int64_t blocks = outputs / BLOCK, second = activation < 0 ? 16 : outputs / 2, step = activation < 0 ? BLOCK : 16;
  const int64_t out_row = blocks * step;
  int64_t range = std::clamp(RANGE_BYTES / (2 * depth), LEAST_RANGE, MOST_RANGE);
  // Ranges of rows that fit the cache, with enough tasks for all threads; none is smaller than a block.
  int64_t ranges = std::max((rows + range / 2) / range, (TASKS_A_THREAD * threads + blocks - 1) / blocks);
  range = ((rows + ranges - 1) / ranges + BLOCK - 1) / BLOCK * BLOCK;
  ranges = (rows + range - 1) / range;
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads((int)std::min<int64_t>(threads, blocks * ranges))
  {
    alignas(64) float c[BLOCK * BLOCK];
    Buffer memory(2 * BLOCK * depth);  // the last, incomplete block of rows, padded with zeros
    if (memory.at == nullptr) failed = true;
    bf16* tail = (bf16*)memory.at;
    const int64_t n_tail = rows % BLOCK;
    if (n_tail && !failed) {
      for (int64_t row = 0; row < n_tail; ++row)
        std::memcpy((void*)(tail + row * depth), x + (rows - n_tail + row) * x_row, 2 * depth);
      std::memset((void*)(tail + n_tail * depth), 0, 2 * (BLOCK - n_tail) * depth);
    }
    Tiles::begin();
#pragma omp for schedule(static)
    for (int64_t task = 0; task < blocks * ranges; ++task) {
      if (failed) continue;
      const int64_t block = task % blocks, first = task / blocks * range, last = std::min(first + range, rows);
      const uint32_t* w = (const uint32_t*)packed + block * BLOCK * depth / 2;
      const bf16* low = bias ? bias + block * step : nullptr;
      const Floats b0 = bias ? load(low) : Floats{}, b1 = bias ? load(low + second) : Floats{};
      for (int64_t row = first; row < last; row += BLOCK) {
        const int here = (int)std::min<int64_t>(BLOCK, last - row);
        const bf16* from = here < BLOCK ? tail : x + row * x_row;
        const int64_t from_row = here < BLOCK ? depth : x_row;
        if (here > 16) product_block<true>(c, from, from_row, w, depth);
        else product_block<false>(c, from, from_row, w, depth);
        bf16* to = (bf16*)out_ + row * out_row + block * step;
        for (int i = 0; i < here; ++i, to += out_row) {
          const Floats one = load(c + i * BLOCK) + b0, other = load(c + i * BLOCK + 16) + b1;
          if (activation < 0) _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)other, (__m512)one));
          else store(to, activated(one, activation) * other);
        }
      }
    }
    Tiles::end();
  }
  return failed ? NO_MEMORY : DONE;
}

#else
constexpr bool HAS_PRODUCTS = false;
int pack_product(void*, const void*, int64_t, int64_t, int32_t, int32_t) { return REFUSED; }
int product(void*, const void*, int64_t, const void*, const void*, int64_t, int64_t, int64_t, int32_t, int32_t) { return REFUSED; }
#endif

}  // namespace SGL_PREFILL_BUILD
