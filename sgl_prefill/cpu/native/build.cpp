// One build of all kernels, for one kind of processor. SGL_PREFILL_BUILD is its name.
#include "products.h"

#define TEXT(x) #x
#define NAME(x) TEXT(x)
#define TABLE_(x) sgl_prefill_##x
#define TABLE(x) TABLE_(x)

namespace B = SGL_PREFILL_BUILD;
extern "C" const Build TABLE(SGL_PREFILL_BUILD) = {
    NAME(SGL_PREFILL_BUILD), B::attention, B::rms_norm, B::gated, B::rotate, B::store_kv, B::logits,
    B::HAS_PRODUCTS, B::pack_product, B::product};
