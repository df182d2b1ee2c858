// Prefill attention of a whole step in one call: any mix of requests, K and V read from the KV pool by slot.
//
// All matrices are transposed, so that vector lanes are query rows (a row: one token of one query head):
//     S^T[key, row]  = K . Q^T
//     P^T            = exp2(S^T - m)       m: one reference per row, raised only when sums leave the range of float32
//     l[row]        += sum of P over keys
//     O^T[dim, row] += V^T . P^T           the result is O / l
// Softmax then needs no horizontal operation, and a mask compares a lane's bounds with the key's position.
//
// Letter       | Member                     | Shape, type
// q            | RowGroup::queries          | [dim / PER_WORD][LANES] words; Scratch::queries holds those of all row groups
// k            | Scratch::keys              | one packed tile of TILE_KEYS keys (formats.h)
// v            | Scratch::values            | the same of values
// s            | Scratch::scores            | [KEYS][LANES] float32
// p            | Scratch::probabilities     | [TILE_KEYS / PER_WORD][LANES] words
// m            | RowGroup::reference        | [LANES] float32, in units of log2
// l            | RowGroup::denominator      | [LANES] float32
// o            | RowGroup::output           | [dim][LANES] float32; Scratch::output holds those of all row groups
//
// A block is up to BLOCK_ROWS rows of one KV head, of requests that share a prefix. It attends to that prefix once for all of
// them (BatchLLM, section 5: prefix and own tokens in one kernel), then to each request's own positions. Keys and values are
// packed tile by tile for the block, in the layout of the build's matrix products (`F`, a format of formats.h).
//
// A row's bits depend only on its query and the keys that it sees: not on other rows, blocks, threads, or shared positions.
// Steps of KEYS keys begin at multiples of KEYS from position 0 and come in ascending order; keys that a row does not see add
// zeros; and m is raised only for the rows that need it.
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

constexpr int BLOCK_ROWS = 512;  // rows that share a packed tile; MAX_QUERY_HEADS_PER_KV_HEAD in calls.py
// Above this sum of exp2(s - m) over KEYS keys m is raised. Any m within 2^64 of the maximum gives the same result, since
// bfloat16 and float32 have the same exponents.
constexpr float LARGEST_SUM = 0x1p64f;
constexpr float LOG2_E = 1.4426950408889634f;

struct Row {
  int token;  // index in the query tensor
  int request;
  int position;  // in the request
};

// Up to F::LANES rows of a block, and their state.
template <class F>
struct RowGroup {
  alignas(64) float reference[F::LANES], denominator[F::LANES];
  alignas(64) int32_t low[F::LANES], high[F::LANES];  // a row sees the positions [low, high) of the current part
  int n_rows, least_low, most_low, least_high, most_high;
  typename F::Word* queries;
  float* output;
};

template <class F>
struct Scratch {
  using Word = typename F::Word;
  static constexpr size_t SCORE_BYTES = 4 * F::KEYS * F::LANES;
  static constexpr size_t PROBABILITY_BYTES = sizeof(Word) * F::TILE_KEYS / F::PER_WORD * F::LANES;

  Buffer memory;  // of all pointers below and in `groups`
  float *output, *scores;
  Word *probabilities, *queries, *keys, *values;
  RowGroup<F> groups[BLOCK_ROWS / F::LANES];
  Row rows[BLOCK_ROWS];

  explicit Scratch(int dim)
      : memory(SCORE_BYTES + PROBABILITY_BYTES +
               (4ul * BLOCK_ROWS + (BLOCK_ROWS + 2 * F::TILE_KEYS) * sizeof(Word) / F::PER_WORD) * dim) {
    scores = (float*)memory.at;
    probabilities = (Word*)(memory.at + SCORE_BYTES);
    output = (float*)((char*)probabilities + PROBABILITY_BYTES);
    queries = (Word*)(output + (int64_t)BLOCK_ROWS * dim);
    keys = queries + (int64_t)BLOCK_ROWS * dim / F::PER_WORD;
    values = keys + (int64_t)F::TILE_KEYS * dim / F::PER_WORD;
  }
};

// Write p = exp2(s - m) of keys [key, key + n_keys) and add it to the denominators. in_range: all bits set for each row whose
// sum stays below LARGEST_SUM. If one row's does not, returns false, and only p has changed. NR: vectors of rows.
template <class F, int NR, bool MASKED>
INLINE bool exponentiate(const float* s, int key, int n_keys, RowGroup<F>& group, float factor, typename F::Word* p,
                         Ints (&in_range)[NR]) {
  Floats sum[NR], m[NR];
  for (int j = 0; j < NR; ++j) sum[j] = Floats{}, m[j] = load(group.reference + WIDTH * j);
  const auto one = [&](int i, int j) INLINE_LAMBDA {
    Floats x = exp2_of<F::PER_WORD == 2>(load(s + i * F::LANES + WIDTH * j) * factor - m[j]);
    if (MASKED) {
      const Ints position = Ints{} + (key + i);
      const Ints seen = (*(const Ints*)(group.low + WIDTH * j) <= position) & (position < *(const Ints*)(group.high + WIDTH * j));
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
  Ints all_in_range = Ints{} - 1;
  for (int j = 0; j < NR; ++j) all_in_range &= in_range[j] = sum[j] < all(LARGEST_SUM);
  for (int lane = 0; lane < WIDTH; ++lane)
    if (!all_in_range[lane]) return false;
  for (int j = 0; j < NR; ++j) store(group.denominator + WIDTH * j, load(group.denominator + WIDTH * j) + sum[j]);
  return true;
}

// Raise m of the rows that are not `in_range` to the largest score that they see among these keys, and scale their denominators
// and outputs. Those of other rows are multiplied by 1.
template <class F, int NR>
void raise_reference(const float* s, int key, int n_keys, RowGroup<F>& group, int dim, float factor,
                     const Ints (&in_range)[NR]) {
  for (int j = 0; j < NR; ++j) {
    const Floats old = load(group.reference + WIDTH * j);
    Floats top = old;
    for (int i = 0; i < n_keys; ++i) {
      const Ints position = Ints{} + (key + i);
      const Ints seen = (*(const Ints*)(group.low + WIDTH * j) <= position) & (position < *(const Ints*)(group.high + WIDTH * j));
      const Floats x = load(s + i * F::LANES + WIDTH * j) * factor;
      top = (seen & ~in_range[j] & (x > top)) ? x : top;
    }
    store(group.reference + WIDTH * j, top);
    const Ints is_first = old == all(-INFINITY);  // m has no value yet: nothing to scale
    const Floats alpha = is_first ? Floats{} : exp2_of(old - (is_first ? Floats{} : top));
    store(group.denominator + WIDTH * j, load(group.denominator + WIDTH * j) * alpha);
    for (int d = 0; d < dim; ++d) {
      float* at = group.output + d * F::LANES + WIDTH * j;
      store(at, load(at) * alpha);
    }
  }
}

// scores = cap * tanh(scale * score / cap); the factor log2(e) follows later
template <class F, int NR>
void cap_scores(float* s, int n_keys, float scale, float cap) {
  for (int i = 0; i < n_keys * F::LANES; i += F::LANES)
    for (int j = 0; j < NR; ++j) {
      const Floats y = load(s + i + WIDTH * j) * (2 * LOG2_E * scale / cap);  // tanh(y) = 1 - 2 / (1 + e^2y)
      const Floats e = exp2_of(smaller(larger(y, all(-100.0f)), all(100.0f))) + 1.0f;
      store(s + i + WIDTH * j, (1.0f - 2.0f / e) * cap);
    }
}

// Attention of one row group over the packed keys [key, end).
template <class F, int NR>
void attend_tile(const Attention& args, Scratch<F>& scratch, RowGroup<F>& group, int key, int end) {
  const int tile_start = key, dim = F::padded(args.dim);
  key += std::max(group.least_low - key, 0) / F::KEYS * F::KEYS;  // whole steps, as they were packed
  end = std::min(end, group.most_high);
  if (key >= end) return;
  const float factor = args.soft_cap > 0 ? LOG2_E : args.scale * LOG2_E;
  int first = key;  // probabilities of [first, now) are not yet in the output
  const auto flush = [&](int now) {
    if (now > first)
      F::template accumulate<NR>(group.output, scratch.values, scratch.probabilities, first - tile_start, now - first, dim);
    first = now;
  };
  for (; key < end; key += F::KEYS) {
    const int n_keys = std::min(F::KEYS, end - key);
    F::template scores<NR>(scratch.scores, scratch.keys, key - tile_start, group.queries, dim);
    if (args.soft_cap > 0) cap_scores<F, NR>(scratch.scores, n_keys, args.scale, args.soft_cap);
    const bool all_seen = key >= group.most_low && key + n_keys <= group.least_high;
    typename F::Word* p = scratch.probabilities + (int64_t)(key - first) / F::PER_WORD * F::LANES;
    Ints in_range[NR];
    const bool all_in_range = all_seen ? exponentiate<F, NR, false>(scratch.scores, key, n_keys, group, factor, p, in_range)
                                       : exponentiate<F, NR, true>(scratch.scores, key, n_keys, group, factor, p, in_range);
    if (!all_in_range) {
      flush(key);
      raise_reference<F, NR>(scratch.scores, key, n_keys, group, dim, factor, in_range);
      exponentiate<F, NR, true>(scratch.scores, key, n_keys, group, factor, scratch.probabilities, in_range);
    }
  }
  flush(end);
}

template <class F>
struct Block {
  int kv_head, request_group;
  int start, end;  // tokens of the request group, counted over its requests in order
  int64_t work;    // estimated; the largest blocks run first
};

// Attention of `n_groups` row groups over positions [start, end) of one request.
template <class F>
void attend_part(const Attention& args, Scratch<F>& scratch, int kv_head, RowGroup<F>* groups, int n_groups, int request,
                 int start, int end) {
  using T = typename F::Element;
  const int32_t* slots = args.slots + args.slot_row[request] * args.slots_stride;
  const T* key_pool = (const T*)args.key_pool + kv_head * args.key_head;
  const T* value_pool = (const T*)args.value_pool + kv_head * args.value_head;
  for (int key = start; key < end; key += F::TILE_KEYS) {
    const int stop = std::min(key + F::TILE_KEYS, end);
    F::pack_keys(scratch.keys, key_pool, args.key_slot, slots + key, stop - key, args.dim);
    F::pack_values(scratch.values, value_pool, args.value_slot, slots + key, stop - key, args.dim);
    for (int i = 0; i < n_groups; ++i) {
      RowGroup<F>& group = groups[i];
      if (group.most_high <= key || group.least_low >= stop) continue;
      switch ((group.n_rows + WIDTH - 1) / WIDTH) {
        case 1: attend_tile<F, 1>(args, scratch, group, key, stop); break;
        case 2: attend_tile<F, 2>(args, scratch, group, key, stop); break;
        case 3: if constexpr (F::LANES >= 3 * WIDTH) { attend_tile<F, 3>(args, scratch, group, key, stop); break; }
        default: attend_tile<F, F::LANES / WIDTH>(args, scratch, group, key, stop);
      }
    }
  }
}

template <class F>
void attend_block(const Attention& args, Scratch<F>& scratch, const Block<F>& block) {
  using T = typename F::Element;
  const int per_token = args.heads / args.kv_heads, n_rows = (block.end - block.start) * per_token, dim = F::padded(args.dim);
  const int n_groups = (n_rows + F::LANES - 1) / F::LANES;
  int row = 0, first_in_group = 0;  // of the block; token of the request group
  for (int i = args.group_start[block.request_group]; i < args.group_start[block.request_group + 1]; ++i) {
    const int request = args.order[i], n_tokens = args.first_token[request + 1] - args.first_token[request];
    const int from = std::max(block.start - first_in_group, 0), to = std::min(block.end - first_in_group, n_tokens);
    for (int t = from; t < to; ++t)
      for (int h = 0; h < per_token; ++h)
        scratch.rows[row++] = {args.first_token[request] + t, request, args.kv_tokens[request] - n_tokens + t};
    first_in_group += n_tokens;
  }
  for (int i = 0; i < n_groups; ++i) {
    RowGroup<F>& group = scratch.groups[i];
    group.queries = scratch.queries + (int64_t)i * F::LANES * dim / F::PER_WORD;
    group.output = scratch.output + (int64_t)i * F::LANES * dim;
    group.n_rows = std::min(F::LANES, n_rows - i * F::LANES);
    std::fill(group.reference, group.reference + F::LANES, -INFINITY);
    std::fill(group.denominator, group.denominator + F::LANES, 0.0f);
    std::fill(group.output, group.output + (int64_t)dim * F::LANES, 0.0f);
    for (int lane = 0; lane < group.n_rows; lane += WIDTH) {
      const T* queries[WIDTH];
      for (int j = 0; j < WIDTH; ++j) {
        const int at = i * F::LANES + std::min(lane + j, group.n_rows - 1);
        const int head = block.kv_head * per_token + at % per_token;
        queries[j] = (const T*)args.query + scratch.rows[at].token * args.query_token + head * args.query_head;
      }
      F::pack_queries(group.queries + lane, queries, args.dim);
    }
  }
  // Set which of a request's positions [start, end) the rows [first_row, last_row) see; other rows of their row groups see none.
  // Returns the lowest position that is seen.
  const auto set_bounds = [&](int first_row, int last_row, int start, int end) {
    int lowest = end;
    for (int i = first_row / F::LANES; i <= (last_row - 1) / F::LANES; ++i) {
      RowGroup<F>& group = scratch.groups[i];
      for (int lane = 0; lane < F::LANES; ++lane) {
        const int at = i * F::LANES + std::min(lane, group.n_rows - 1), position = scratch.rows[at].position;
        const int low = args.window_tokens < 0 ? start : std::max(start, position - args.window_tokens);
        const int high = args.is_causal ? std::min(end, position + 1) : end;
        const bool sees = first_row <= at && at < last_row && low < high;
        group.low[lane] = sees ? low : end, group.high[lane] = sees ? high : start;
      }
      group.least_low = *std::min_element(group.low, group.low + F::LANES);
      group.most_low = *std::max_element(group.low, group.low + F::LANES);
      group.least_high = *std::min_element(group.high, group.high + F::LANES);
      group.most_high = *std::max_element(group.high, group.high + F::LANES);
      lowest = std::min(lowest, group.least_low);
    }
    return lowest;
  };
  const auto part = [&](int first_row, int last_row, int start, int end) {
    const int from = set_bounds(first_row, last_row, start, end) / F::KEYS * F::KEYS;
    const int first = first_row / F::LANES, n = (last_row - 1) / F::LANES - first + 1;
    attend_part<F>(args, scratch, block.kv_head, scratch.groups + first, n, scratch.rows[first_row].request, from, end);
  };
  const int n_shared = args.shared_tokens[block.request_group] / F::KEYS * F::KEYS;
  if (n_shared > 0) part(0, n_rows, 0, n_shared);
  for (int first = 0, last; first < n_rows; first = last) {
    const int request = scratch.rows[first].request;
    for (last = first; last < n_rows && scratch.rows[last].request == request; ++last) {}
    part(first, last, n_shared, args.is_causal ? scratch.rows[last - 1].position + 1 : args.kv_tokens[request]);
  }
  for (int i = 0; i < n_rows; i += WIDTH) {
    RowGroup<F>& group = scratch.groups[i / F::LANES];
    const int lane = i % F::LANES, n_here = std::min(WIDTH, n_rows - i);
    const Floats l = load(group.denominator + lane), share = l == Floats{} ? Floats{} : 1.0f / l;
    T* outs[WIDTH];
    for (int j = 0; j < n_here; ++j) {
      const int token = scratch.rows[i + j].token, head = block.kv_head * per_token + (i + j) % per_token;
      outs[j] = (T*)args.out + token * args.out_token + head * args.out_head;
      if (args.lse)
        args.lse[(int64_t)token * args.heads + head] =
            l[j] == 0 ? -INFINITY : (group.reference[lane + j] + std::log2(l[j])) / LOG2_E;
    }
    const float* o = group.output + lane;
    int d = 0;
    for (; d + WIDTH <= args.dim; d += WIDTH) {
      Words columns[WIDTH];
      for (int j = 0; j < WIDTH; ++j) columns[j] = (Words)(load(o + (d + j) * F::LANES) * share);
      transpose(columns);
      for (int j = 0; j < n_here; ++j) store(outs[j] + d, (Floats)columns[j]);
    }
    for (; d < args.dim; ++d)
      for (int j = 0; j < n_here; ++j) store_one(outs[j] + d, o[d * F::LANES + j] * share[j]);
  }
}

// Blocks are small enough that each thread has several, and large enough that a packed tile serves many rows.
template <class F>
std::vector<Block<F>> blocks_of(const Attention& args) {
  const int per_token = args.heads / args.kv_heads;
  const int64_t n_rows = (int64_t)args.first_token[args.requests] * per_token * args.kv_heads;
  const int64_t wanted = std::max<int64_t>(n_rows / (4 * args.threads), F::LANES);
  const int tokens = std::max<int>(std::min<int64_t>(BLOCK_ROWS, wanted) / per_token, 1);
  std::vector<Block<F>> blocks;
  for (int group = 0; group < args.groups; ++group) {
    int n_tokens = 0;
    int64_t n_own = 0;  // positions that are not shared, over all requests of the group
    for (int i = args.group_start[group]; i < args.group_start[group + 1]; ++i) {
      const int request = args.order[i];
      n_tokens += args.first_token[request + 1] - args.first_token[request];
      n_own += args.kv_tokens[request] - args.shared_tokens[group];
    }
    const bool is_one_request = args.group_start[group + 1] - args.group_start[group] == 1;
    for (int start = 0; start < n_tokens; start += tokens) {
      const int end = std::min(start + tokens, n_tokens);
      const int64_t own_keys = is_one_request && args.is_causal ? n_own - n_tokens + end : n_own * (end - start) / n_tokens;
      for (int h = 0; h < args.kv_heads; ++h)
        blocks.push_back({h, group, start, end, (end - start) * (own_keys + args.shared_tokens[group] + 64)});
    }
  }
  std::stable_sort(blocks.begin(), blocks.end(), [](const auto& one, const auto& other) { return one.work > other.work; });
  return blocks;
}

template <class F>
int attend(const Attention& args) {
  const std::vector<Block<F>> blocks = blocks_of<F>(args);
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const int threads = (int)std::min<size_t>(args.threads, blocks.size());
#pragma omp parallel num_threads(threads)
  {
    try {
      Scratch<F> scratch(F::padded(args.dim));
      if (scratch.memory.at == nullptr) throw std::bad_alloc();
      F::begin();
      for (size_t at; (at = next++) < blocks.size();) attend_block<F>(args, scratch, blocks[at]);
      F::end();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  }
  return failed ? NO_MEMORY : DONE;
}

int attention(const Attention* a) {
  if (a->dim % 2 || a->heads % a->kv_heads || a->heads / a->kv_heads > BLOCK_ROWS) return REFUSED;
  if (a->requests == 0 || a->first_token[a->requests] == 0) return DONE;
  return a->is_float32 ? attend<Wide<float>>(*a) : attend<Narrow>(*a);
}

}  // namespace SGL_PREFILL_BUILD
