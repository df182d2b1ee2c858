// Prefill attention of a whole step in one call: any mix of requests, K and V read from the pool by slot.
//
// Everything is computed transposed, so that vector lanes are query rows (a row: one token of one query head):
//     S^T[key, row] = K . Q^T
//     P^T = exp2(S^T - m)            m is a reference, renewed only where it no longer suits
//     O^T[dim, row] += V^T . P^T
// so softmax needs no horizontal operation, and a mask is a compare of a lane's bounds with the key's position.
// A block is up to BLOCK_ROWS rows of one KV head and of requests that share a prefix. It attends that prefix once for all of
// them (BatchLLM, section 5: prefix and own tokens in one kernel), then each request's own positions. Keys and values are
// packed tile by tile for the block, in the form that the build's matrix products want (`Format`).
//
// A row's bits depend on its query and on the keys that it sees, and on nothing else: not on the rows beside it, nor on the
// block, on threads, or on which positions are shared. Steps of KEYS keys begin at multiples of KEYS, counted from position 0;
// they come in ascending order; keys that a row does not see add zeros; and m is renewed for the rows that need it alone.
#pragma once
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "formats.h"
#include "interface.h"

namespace SGL_PREFILL_BUILD {

constexpr int BLOCK_ROWS = 512;  // share a packed tile
constexpr float LARGEST_SUM = 0x1p64f;  // of exp2(s - m) over a few keys: above it m is renewed. Any m within 2^64 of the
                                        // maximum gives the same result, since bfloat16 and float32 have the same exponents
constexpr float LOG2_E = 1.4426950408889634f;

struct Row {
  int token;     // of the query tensor
  int request;
  int position;  // in the request
};

// Up to F::LANES rows: their queries, their results so far.
template <class F>
struct Group {
  alignas(64) float m[F::LANES], l[F::LANES];
  alignas(64) int32_t low[F::LANES], high[F::LANES];  // a row sees the positions [low, high) of the part at hand
  int n_rows, least_low, most_low, least_high, most_high;
  typename F::Word* q;  // [dim / F::PER_WORD][LANES]
  float* o;             // [dim][LANES]
};

template <class F>
struct Scratch {
  static constexpr size_t WORD_BYTES = sizeof(typename F::Word), S_BYTES = 4 * F::KEYS * F::LANES;
  static constexpr size_t P_BYTES = WORD_BYTES * F::TILE_KEYS / F::PER_WORD * F::LANES;

  Buffer memory;
  float *o, *s;
  typename F::Word *p, *q, *k, *v;
  Group<F> groups[BLOCK_ROWS / F::LANES];
  Row rows[BLOCK_ROWS];

  explicit Scratch(int dim)
      : memory(S_BYTES + P_BYTES + (4ul * BLOCK_ROWS + (BLOCK_ROWS + 2 * F::TILE_KEYS) * WORD_BYTES / F::PER_WORD) * dim) {
    s = (float*)memory.at, p = (typename F::Word*)(memory.at + S_BYTES), o = (float*)((char*)p + P_BYTES);
    q = (typename F::Word*)(o + (int64_t)BLOCK_ROWS * dim), k = q + (int64_t)BLOCK_ROWS * dim / F::PER_WORD;
    v = k + (int64_t)F::TILE_KEYS * dim / F::PER_WORD;
  }
};

// Probabilities of `n_keys` keys from `key` on against the reference m, into p; false, with nothing changed but p, where m
// does not suit some row. suits: all bits of those whom it suits.
template <class F, int NR, bool MASKED>
INLINE bool probabilities(const float* s, int key, int n_keys, Group<F>& g, float factor, typename F::Word* p, Ints (&suits)[NR]) {
  Floats sum[NR], m[NR];
  for (int j = 0; j < NR; ++j) sum[j] = Floats{}, m[j] = load(g.m + WIDTH * j);
  const auto one = [&](int i, int j) INLINE_LAMBDA {
    Floats x = exp2_of<F::PER_WORD == 2>(load(s + i * F::LANES + WIDTH * j) * factor - m[j]);
    if (MASKED) {
      const Ints position = Ints{} + (key + i);
      const Ints seen = (*(const Ints*)(g.low + WIDTH * j) <= position) & (position < *(const Ints*)(g.high + WIDTH * j));
      x = seen ? x : Floats{};
    }
    return x;
  };
  int i = 0;
  for (; i + F::PER_WORD <= n_keys; i += F::PER_WORD, p += F::LANES) {
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) {
      const Floats even = one(i, j), odd = F::PER_WORD == 2 ? one(i + 1, j) : Floats{};
      sum[j] = F::store_probabilities(p + WIDTH * j, sum[j], even, odd);
    }
  }
  if (i < n_keys) {
    for (int j = 0; j < NR; ++j) sum[j] = F::store_probabilities(p + WIDTH * j, sum[j], one(i, j), Floats{});
  }
  Ints all_suit = Ints{} - 1;
  for (int j = 0; j < NR; ++j) all_suit &= suits[j] = sum[j] < all(LARGEST_SUM);
  for (int lane = 0; lane < WIDTH; ++lane)
    if (!all_suit[lane]) return false;
  for (int j = 0; j < NR; ++j) store(g.l + WIDTH * j, load(g.l + WIDTH * j) + sum[j]);
  return true;
}

// Raise the m of each row whom it does not suit to the largest score that the row sees among these keys, and scale what it has
// so far. The others' stays: they are multiplied by 1.
template <class F, int NR>
void renew(const float* s, int key, int n_keys, Group<F>& g, int dim, float factor, const Ints (&suits)[NR]) {
  for (int j = 0; j < NR; ++j) {
    const Floats old = load(g.m + WIDTH * j);
    Floats top = old;
    for (int i = 0; i < n_keys; ++i) {
      const Ints position = Ints{} + (key + i);
      const Ints seen = (*(const Ints*)(g.low + WIDTH * j) <= position) & (position < *(const Ints*)(g.high + WIDTH * j));
      const Floats x = load(s + i * F::LANES + WIDTH * j) * factor;
      top = (seen & ~suits[j] & (x > top)) ? x : top;
    }
    store(g.m + WIDTH * j, top);
    const Ints is_first = old == all(-INFINITY);  // nothing to scale, and no difference to take
    const Floats alpha = is_first ? Floats{} : exp2_of(old - (is_first ? Floats{} : top));
    store(g.l + WIDTH * j, load(g.l + WIDTH * j) * alpha);
    for (int d = 0; d < dim; ++d) {
      float* at = g.o + d * F::LANES + WIDTH * j;
      store(at, load(at) * alpha);
    }
  }
}

// cap * tanh(score / cap), still to be multiplied by log2 e
template <class F, int NR>
void cap_scores(float* s, int n_keys, float scale, float cap) {
  for (int i = 0; i < n_keys * F::LANES; i += F::LANES)
    for (int j = 0; j < NR; ++j) {
      const Floats y = load(s + i + WIDTH * j) * (2 * LOG2_E * scale / cap);  // tanh(y) = 1 - 2 / (1 + e^2y)
      const Floats e = exp2_of(smaller(larger(y, all(-100.0f)), all(100.0f))) + 1.0f;
      store(s + i + WIDTH * j, (1.0f - 2.0f / e) * cap);
    }
}

// The rows of one group against the packed keys [key, end).
template <class F, int NR>
void attend_tile(const Attention& a, Scratch<F>& x, Group<F>& g, int key, int end) {
  const int tile_start = key, dim = F::padded(a.dim);
  key += std::max(g.least_low - key, 0) / F::KEYS * F::KEYS;  // whole steps, as they were packed
  end = std::min(end, g.most_high);
  if (key >= end) return;
  const float factor = a.soft_cap > 0 ? LOG2_E : a.scale * LOG2_E;
  int first = key;  // probabilities of [first, now) are in p and not yet in o
  const auto flush = [&](int now) {
    if (now > first)
      F::template accumulate<NR>(g.o, x.v, x.p, first - tile_start, now - first, dim);
    first = now;
  };
  for (; key < end; key += F::KEYS) {
    const int n_keys = std::min(F::KEYS, end - key);
    F::template scores<NR>(x.s, x.k, key - tile_start, g.q, dim);
    if (a.soft_cap > 0) cap_scores<F, NR>(x.s, n_keys, a.scale, a.soft_cap);
    const bool all_seen = key >= g.most_low && key + n_keys <= g.least_high;
    typename F::Word* p = x.p + (int64_t)(key - first) / F::PER_WORD * F::LANES;
    Ints suits[NR];
    const bool all_suit = all_seen ? probabilities<F, NR, false>(x.s, key, n_keys, g, factor, p, suits)
                                   : probabilities<F, NR, true>(x.s, key, n_keys, g, factor, p, suits);
    if (!all_suit) {
      flush(key);
      renew<F, NR>(x.s, key, n_keys, g, dim, factor, suits);
      probabilities<F, NR, true>(x.s, key, n_keys, g, factor, x.p, suits);
    }
  }
  flush(end);
}

template <class F>
struct Block {
  int kv_head, group, start, end;  // tokens of the group, counted over its requests in order
  int64_t work;
};

// The positions [start, end) of one request, to these groups of rows.
template <class F>
void attend_part(const Attention& a, Scratch<F>& x, int kv_head, Group<F>* groups, int n_groups, int request, int start, int end) {
  using T = typename F::Element;
  const int32_t* slots = a.slots + a.slot_row[request] * a.slots_stride;
  const T* keys = (const T*)a.key_pool + kv_head * a.key_head;
  const T* values = (const T*)a.value_pool + kv_head * a.value_head;
  for (int key = start; key < end; key += F::TILE_KEYS) {
    const int stop = std::min(key + F::TILE_KEYS, end);
    F::pack_keys(x.k, keys, a.key_slot, slots + key, stop - key, a.dim);
    F::pack_values(x.v, values, a.value_slot, slots + key, stop - key, a.dim);
    for (int i = 0; i < n_groups; ++i) {
      Group<F>& g = groups[i];
      if (g.most_high <= key || g.least_low >= stop) continue;
      switch ((g.n_rows + WIDTH - 1) / WIDTH) {
        case 1: attend_tile<F, 1>(a, x, g, key, stop); break;
        case 2: attend_tile<F, 2>(a, x, g, key, stop); break;
        case 3: if constexpr (F::LANES >= 3 * WIDTH) { attend_tile<F, 3>(a, x, g, key, stop); break; }
        default: attend_tile<F, F::LANES / WIDTH>(a, x, g, key, stop);
      }
    }
  }
}

template <class F>
void attend_block(const Attention& a, Scratch<F>& x, const Block<F>& block) {
  using T = typename F::Element;
  const int per_token = a.heads / a.kv_heads, n_rows = (block.end - block.start) * per_token, dim = F::padded(a.dim);
  const int n_groups = (n_rows + F::LANES - 1) / F::LANES;
  // Which requests, and which of their tokens.
  int row = 0, first_in_group = 0;
  for (int i = a.group_start[block.group]; i < a.group_start[block.group + 1]; ++i) {
    const int request = a.order[i], n_tokens = a.first_token[request + 1] - a.first_token[request];
    const int from = std::max(block.start - first_in_group, 0), to = std::min(block.end - first_in_group, n_tokens);
    for (int t = from; t < to; ++t)
      for (int h = 0; h < per_token; ++h)
        x.rows[row++] = {a.first_token[request] + t, request, a.kv_tokens[request] - n_tokens + t};
    first_in_group += n_tokens;
  }
  for (int i = 0; i < n_groups; ++i) {
    Group<F>& g = x.groups[i];
    g.q = x.q + (int64_t)i * F::LANES * dim / F::PER_WORD, g.o = x.o + (int64_t)i * F::LANES * dim;
    g.n_rows = std::min(F::LANES, n_rows - i * F::LANES);
    std::fill(g.m, g.m + F::LANES, -INFINITY);
    std::fill(g.l, g.l + F::LANES, 0.0f);
    std::fill(g.o, g.o + (int64_t)dim * F::LANES, 0.0f);
    for (int lane = 0; lane < g.n_rows; lane += WIDTH) {
      const T* queries[WIDTH];
      for (int j = 0; j < WIDTH; ++j) {
        const int at = i * F::LANES + std::min(lane + j, g.n_rows - 1);
        const int head = block.kv_head * per_token + at % per_token;
        queries[j] = (const T*)a.query + x.rows[at].token * a.query_token + head * a.query_head;
      }
      F::pack_queries(g.q + lane, queries, a.dim);
    }
  }
  // What the rows [first_row, last_row) see of a request's positions [start, end), other rows of their groups nothing.
  const auto set_bounds = [&](int first_row, int last_row, int start, int end) {
    int lowest = end;
    for (int i = first_row / F::LANES; i <= (last_row - 1) / F::LANES; ++i) {
      Group<F>& g = x.groups[i];
      for (int lane = 0; lane < F::LANES; ++lane) {
        const int at = i * F::LANES + std::min(lane, g.n_rows - 1), position = x.rows[at].position;
        const int low = a.window_tokens < 0 ? start : std::max(start, position - a.window_tokens);
        const int high = a.is_causal ? std::min(end, position + 1) : end;
        const bool sees = first_row <= at && at < last_row && low < high;
        g.low[lane] = sees ? low : end, g.high[lane] = sees ? high : start;
      }
      g.least_low = *std::min_element(g.low, g.low + F::LANES), g.most_low = *std::max_element(g.low, g.low + F::LANES);
      g.least_high = *std::min_element(g.high, g.high + F::LANES), g.most_high = *std::max_element(g.high, g.high + F::LANES);
      lowest = std::min(lowest, g.least_low);
    }
    return lowest;
  };
  const auto part = [&](int first_row, int last_row, int start, int end) {
    const int from = set_bounds(first_row, last_row, start, end) / F::KEYS * F::KEYS;
    const int first = first_row / F::LANES, n = (last_row - 1) / F::LANES - first + 1;
    attend_part<F>(a, x, block.kv_head, x.groups + first, n, x.rows[first_row].request, from, end);
  };
  const int n_shared = a.shared_tokens[block.group] / F::KEYS * F::KEYS;
  if (n_shared > 0) part(0, n_rows, 0, n_shared);
  for (int first = 0, last; first < n_rows; first = last) {
    const int request = x.rows[first].request;
    for (last = first; last < n_rows && x.rows[last].request == request; ++last) {}
    part(first, last, n_shared, a.is_causal ? x.rows[last - 1].position + 1 : a.kv_tokens[request]);
  }
  for (int i = 0; i < n_rows; i += WIDTH) {
    Group<F>& g = x.groups[i / F::LANES];
    const int lane = i % F::LANES, n_here = std::min(WIDTH, n_rows - i);
    const Floats l = load(g.l + lane), share = l == Floats{} ? Floats{} : 1.0f / l;
    T* outs[WIDTH];
    for (int j = 0; j < n_here; ++j) {
      const int token = x.rows[i + j].token, head = block.kv_head * per_token + (i + j) % per_token;
      outs[j] = (T*)a.out + token * a.out_token + head * a.out_head;
      if (a.lse)
        a.lse[(int64_t)token * a.heads + head] = l[j] == 0 ? -INFINITY : (g.m[lane + j] + std::log2(l[j])) / LOG2_E;
    }
    const float* o = g.o + lane;
    int d = 0;
    for (; d + WIDTH <= a.dim; d += WIDTH) {
      Words columns[WIDTH];
      for (int j = 0; j < WIDTH; ++j) columns[j] = (Words)(load(o + (d + j) * F::LANES) * share);
      transpose(columns);
      for (int j = 0; j < n_here; ++j) store(outs[j] + d, (Floats)columns[j]);
    }
    for (; d < a.dim; ++d)
      for (int j = 0; j < n_here; ++j) store_one(outs[j] + d, o[d * F::LANES + j] * share[j]);
  }
}

// Blocks small enough that all threads have several, large enough that a packed tile serves many rows.
template <class F>
std::vector<Block<F>> blocks_of(const Attention& a) {
  const int per_token = a.heads / a.kv_heads;
  const int64_t n_rows = (int64_t)a.first_token[a.requests] * per_token * a.kv_heads;
  const int64_t wanted = std::max<int64_t>(n_rows / (4 * a.threads), F::LANES);
  const int tokens = std::max<int>(std::min<int64_t>(BLOCK_ROWS, wanted) / per_token, 1);
  std::vector<Block<F>> blocks;
  for (int group = 0; group < a.groups; ++group) {
    int n_tokens = 0;
    int64_t n_keys = 0, n_new = 0;
    for (int i = a.group_start[group]; i < a.group_start[group + 1]; ++i) {
      const int request = a.order[i];
      n_tokens += a.first_token[request + 1] - a.first_token[request];
      n_keys += a.kv_tokens[request] - a.shared_tokens[group];
    }
    n_new = n_keys;
    const bool is_one = a.group_start[group + 1] - a.group_start[group] == 1;
    for (int start = 0; start < n_tokens; start += tokens) {
      const int end = std::min(start + tokens, n_tokens);
      const int64_t own = is_one && a.is_causal ? n_new - n_tokens + end : n_new * (end - start) / n_tokens;
      for (int h = 0; h < a.kv_heads; ++h)
        blocks.push_back({h, group, start, end, (end - start) * (own + a.shared_tokens[group] + 64)});
    }
  }
  std::stable_sort(blocks.begin(), blocks.end(), [](const auto& one, const auto& other) { return one.work > other.work; });
  return blocks;
}

template <class F>
int attend(const Attention& a) {
  const std::vector<Block<F>> blocks = blocks_of<F>(a);
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const int threads = (int)std::min<size_t>(a.threads, blocks.size());
#pragma omp parallel num_threads(threads)
  {
    try {
      Scratch<F> scratch(F::padded(a.dim));
      if (scratch.memory.at == nullptr) throw std::bad_alloc();
      F::begin();
      for (size_t at; (at = next++) < blocks.size();) attend_block<F>(a, scratch, blocks[at]);
      F::end();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  }
  return failed ? 2 : 0;
}

int attention(const Attention* a) {
  if (a->dim % 2 || a->heads % a->kv_heads || a->heads / a->kv_heads > BLOCK_ROWS) return 1;
  if (a->requests == 0 || a->first_token[a->requests] == 0) return 0;
  return a->is_float32 ? attend<Wide<float>>(*a) : attend<Narrow>(*a);
}

}  // namespace SGL_PREFILL_BUILD
