// Selects a build: which ones this library holds and this processor can run. Compiled for every processor of the architecture.
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
  // On Linux a process must request the tile registers.
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

// Names of the builds that run on this processor, the best first, separated by commas.
EXPORT const char* sgl_prefill_builds() {
  static char names[128] = "";
  names[0] = 0;
#define ADD(name) \
  if (runs(#name)) std::strcat(std::strcat(names, names[0] ? "," : ""), #name);
  SGL_PREFILL_BUILDS(ADD)
  return names;
}

// The build of this name; null if the library lacks it or this processor cannot run it.
EXPORT const Build* sgl_prefill_build(const char* name) {
#define FIND(build) \
  if (!std::strcmp(name, #build) && runs(name)) return &sgl_prefill_##build;
  SGL_PREFILL_BUILDS(FIND)
  return nullptr;
}

// Digest of the sources that the library was built from.
EXPORT const char* sgl_prefill_digest() { return SGL_PREFILL_DIGEST; }
