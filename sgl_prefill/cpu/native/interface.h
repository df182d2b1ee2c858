// What Python and the kernels exchange. calls.py declares the same structures in ctypes: a test compares the fields, and the
// assertions below fix the layout. Strides count elements unless a name says bytes.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

struct Attention {
  // Queries and results, [tokens, heads, dim], of the pools' number type; `out` may be `query`.
  const void* query;
  int64_t query_token, query_head;
  void* out;
  int64_t out_token, out_head;
  float* lse;  // [tokens, heads], natural logarithm of the softmax denominators; null: not computed
  // Pools, [slots, kv heads, dim].
  const void* key_pool;
  int64_t key_slot, key_head;
  const void* value_pool;
  int64_t value_slot, value_head;
  // The KV slot of position p of request r: slots[slot_row[r] * slots_stride + p].
  const int32_t* slots;
  int64_t slots_stride;
  const int64_t* slot_row;     // [requests]
  const int32_t* first_token;  // [requests + 1]: request r has queries [first_token[r], first_token[r + 1]), its last positions
  const int32_t* kv_tokens;    // [requests]
  // Request group g: order[group_start[g]] to order[group_start[g + 1] - 1], whose first shared_tokens[g] positions have the same
  // slots.
  const int32_t* order;          // [requests]
  const int32_t* group_start;    // [groups + 1]
  const int32_t* shared_tokens;  // [groups]
  int32_t requests, groups, heads, kv_heads, dim;
  int32_t is_float32, is_causal;
  int32_t window_tokens;  // a query at position p sees keys from p - window_tokens on; negative: all
  float scale, soft_cap;  // soft_cap 0: none
  int32_t threads;
};

// What a kernel returns. REFUSED: it does not support these sizes.
enum Status : int32_t { DONE = 0, REFUSED = 1, NO_MEMORY = 2 };

// The functions of one build.
struct Build {
  const char* name;
  int (*attention)(const Attention*);
  int (*rms_norm)(void* out, const void* x, int64_t x_row, void* residual, const void* weight, float weight_offset, float eps,
                  int64_t rows, int64_t columns, int32_t is_float32, int32_t threads);
  int (*gated)(void* out, const void* gate_up, int64_t rows, int64_t columns, int32_t kind, int32_t is_float32, int32_t threads);
  int (*rotate)(void* x, int64_t x_row, int64_t x_head, const int64_t* positions, const float* cos_sin, int64_t rows,
                int32_t heads, int32_t rotary_dim, int32_t is_neox, int32_t is_float32, int32_t threads);
  int (*store)(void* key_pool, int64_t key_slot_bytes, void* value_pool, int64_t value_slot_bytes, const int64_t* slots,
               const void* key, int64_t key_stride_bytes, const void* value, int64_t value_stride_bytes, int64_t rows,
               int64_t key_bytes, int64_t value_bytes, int32_t threads);
  int (*logits)(float* out, const void* hidden, const void* weight, int64_t rows, int64_t vocabulary, int64_t columns,
                int32_t is_float32, int32_t threads);
  int32_t has_products;  // whether pack_product and product are supported; both in bfloat16
  int (*pack_product)(void* packed, const void* weight, int64_t outputs, int64_t depth, int32_t has_gate, int32_t threads);
  int (*product)(void* out, const void* x, int64_t x_row, const void* packed, const void* bias, int64_t rows, int64_t outputs,
                 int64_t depth, int32_t activation, int32_t threads);
};

static_assert(sizeof(Attention) == 216 && offsetof(Attention, slots) == 104 && offsetof(Attention, requests) == 168 &&
              offsetof(Attention, threads) == 208);
static_assert(sizeof(Build) == 80 && offsetof(Build, has_products) == 56 && offsetof(Build, product) == 72);
}
