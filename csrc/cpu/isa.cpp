#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace packattn::cpu {

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned eax, ebx, ecx = 0, edx;  // f16c by hand: not every clang has a name for it
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    names.push_back("avx512");
  }
  if (avx2) names.push_back("avx2");
#endif
  names.push_back("portable");
  return names;
}

const char* isa() {
  // A static whose initialiser throws is tried again by the next call, so a wrong variable fails every time.
  static const std::string chosen = [] {
    const std::vector<std::string> names = available_isas();
    const char* wanted = std::getenv("PACKATTN_CPU_ISA");
    if (wanted == nullptr || *wanted == '\0') return names.front();
    std::string list;
    for (const std::string& name : names) {
      if (name == wanted) return name;
      list += (list.empty() ? "" : ", ") + name;
    }
    throw std::runtime_error("PACKATTN_CPU_ISA: expected one of " + list + " on this machine, got \"" +
                             std::string(wanted) + "\"");
  }();
  return chosen.c_str();
}

}  // namespace packattn::cpu
