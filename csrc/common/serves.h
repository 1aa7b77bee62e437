// Which calls the compiled kernels serve. The host ops decide with it, and `packattn info` reports it.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace packattn {

// Why the compiled CPU kernels do not serve this call; empty if they do.
// dtype: torch's name without "torch.", for example "bfloat16".
inline std::vector<std::string> cpu_refusals(std::string_view dtype, int64_t head_dim, int64_t head_dim_v) {
  std::vector<std::string> reasons;
  if (dtype != "float32" && dtype != "bfloat16" && dtype != "float16") {
    reasons.push_back("dtype: the CPU kernels serve float32, bfloat16 and float16, not " + std::string(dtype));
  }
  const auto check = [&](const char* name, int64_t dim) {
    if (dim < 8 || dim > 512 || dim % 8 != 0) {
      reasons.push_back(std::string(name) + ": the CPU kernels serve multiples of 8 from 8 to 512, not " +
                        std::to_string(dim));
    }
  };
  check("head_dim", head_dim);
  check("head_dim_v", head_dim_v);
  return reasons;
}

}  // namespace packattn
