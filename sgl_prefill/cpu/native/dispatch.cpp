// Which builds this library holds and this processor can run. Compiled for any processor of its architecture.
#include <cstring>

#include "interface.h"
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define DECLARE(name) extern "C" const Build sgl_prefill_##name;
SGL_PREFILL_BUILDS(DECLARE)

namespace {

#if defined(__x86_64__)
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 22 & 1)) return false;  // AMX-TILE, AMX-BF16
#if defined(__linux__)
  // Linux gives a process tiles only where it asks.
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
  return false;
#endif
}

bool has_avx512_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

bool runs(const char* name) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!std::strcmp(name, "avx2")) return avx2;
  if (!std::strcmp(name, "avx512")) return avx512;
  if (!std::strcmp(name, "avx512_bf16")) return avx512 && has_avx512_bf16();
  if (!std::strcmp(name, "amx")) return avx512 && has_avx512_bf16() && has_amx();
  return true;
}
#else
bool runs(const char*) { return true; }
#endif

}  // namespace

// The names of the builds that run here, the best first, separated by commas.
EXPORT const char* sgl_prefill_builds() {
  static char names[128] = "";
  names[0] = 0;
#define ADD(name) \
  if (runs(#name)) std::strcat(std::strcat(names, names[0] ? "," : ""), #name);
  SGL_PREFILL_BUILDS(ADD)
  return names;
}

// A build by name; null where it is not here or does not run.
EXPORT const Build* sgl_prefill_build(const char* name) {
#define FIND(build) \
  if (!std::strcmp(name, #build) && runs(name)) return &sgl_prefill_##build;
  SGL_PREFILL_BUILDS(FIND)
  return nullptr;
}

// Of the sources: a library of others is not used.
EXPORT const char* sgl_prefill_digest() { return SGL_PREFILL_DIGEST; }
