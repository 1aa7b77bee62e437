// Which CUDA kernels serve a call. The host ops ask before they allocate, the planner before it launches, `packattn
// info` and the tests to report it; nobody else decides. Host code without CUDA, so that a build without a toolkit
// knows as well.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "../common/params.h"

namespace packattn::cuda {

// plain: attention_plain.cuh, any GPU. sm80: tensor cores of compute capability 8.0 and later. sm90: wgmma and bulk
// copies of compute capability 9.0, only on request until a GPU has measured it.
enum class Family { plain, sm80, sm90 };

inline const char* family_name(Family family) {
  return family == Family::plain ? "plain" : family == Family::sm80 ? "sm80" : "sm90";
}

constexpr int kPlainMaxHeadDim = 512;

// Head dims of the tensor-core instantiations, cheapest first. A call takes the first that holds its own head dims; the
// rest of the columns is zero-filled.
struct HeadDims {
  int head_dim;
  int head_dim_v;
};
constexpr HeadDims kTensorCoreHeadDims[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};
constexpr HeadDims kHopperHeadDims[] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};

// What the choice of a kernel depends on.
struct Call {
  DType dtype = DType::float32;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
  float scale = 1.f;
  int capability = 80;  // compute capability of the device, 80 for 8.0
  bool mapped = false;  // whether bulk copies can take query, key and value, and in the backward dout (can_be_mapped)
};

// Whether a tensor map can describe a [rows, heads, dim] tensor of 16-bit numbers that is_aligned: sizes below 2^32,
// and strides below 2^40 bytes. Strides of 0 (expanded tensors) are not documented to work. Source: CUDA Driver API,
// cuTensorMapEncodeTiled.
inline bool can_be_mapped(const TensorView& view, int64_t rows, int64_t heads) {
  const auto fits = [](int64_t stride, int64_t size) {
    return size <= 1 || (stride > 0 && stride < (int64_t{1} << 39) && size < (int64_t{1} << 31));
  };
  return fits(view.row_stride, rows) && fits(view.head_stride, heads);
}

inline Call forward_call(const AttentionForwardParams& params, int capability) {
  const bool mapped = can_be_mapped(params.query, params.total_q, params.heads_q) &&
                      can_be_mapped(params.key, params.total_k, params.heads_k) &&
                      can_be_mapped(params.value, params.total_k, params.heads_k);
  return {params.dtype, params.head_dim, params.head_dim_v, params.scale, capability, mapped};
}
inline Call backward_call(const AttentionBackwardParams& params, int capability) {
  Call call = forward_call(params, capability);
  call.mapped = call.mapped && can_be_mapped(params.dout, params.total_q, params.heads_q);
  return call;
}

struct Choice {
  Family family = Family::plain;
  HeadDims instantiation{0, 0};  // of the tensor-core kernel; 0, 0 for plain
};

// "plain" or, with the head dims of the instantiation, "sm80 192/128", "sm90 64".
inline std::string describe(const Choice& choice) {
  std::string text = family_name(choice.family);
  if (choice.family != Family::plain) {
    text += ' ' + std::to_string(choice.instantiation.head_dim);
    if (choice.instantiation.head_dim_v != choice.instantiation.head_dim) {
      text += '/' + std::to_string(choice.instantiation.head_dim_v);
    }
  }
  return text;
}

// Kernels read and write 16 bytes at a time: base address, row stride and head stride must be multiples of that. The
// host op copies what is not.
constexpr int kAlignment = 16;

inline bool is_aligned(const TensorView& view, int element_bytes) {
  return reinterpret_cast<uintptr_t>(view.data) % kAlignment == 0 &&
         view.row_stride * element_bytes % kAlignment == 0 && view.head_stride * element_bytes % kAlignment == 0;
}

// Why no CUDA kernel serves this dtype and these head dims; empty if one does.
// dtype: torch's name without "torch.", for example "bfloat16".
inline std::vector<std::string> cuda_refusals(std::string_view dtype, int64_t head_dim, int64_t head_dim_v) {
  std::vector<std::string> reasons;
  if (dtype != "float32" && dtype != "bfloat16" && dtype != "float16") {
    reasons.push_back("dtype: the CUDA kernels serve float32, bfloat16 and float16, not " + std::string(dtype));
  }
  const auto check = [&](const char* name, int64_t dim) {
    if (dim < 8 || dim > kPlainMaxHeadDim || dim % 8 != 0) {
      reasons.push_back(std::string(name) + ": the CUDA kernels serve multiples of 8 from 8 to " +
                        std::to_string(kPlainMaxHeadDim) + ", not " + std::to_string(dim));
    }
  };
  check("head_dim", head_dim);
  check("head_dim_v", head_dim_v);
  return reasons;
}

// Why the tensor-core kernels do not serve a call that cuda_refusals lets pass; empty if they do.
inline std::vector<std::string> sm80_refusals(const Call& call) {
  std::vector<std::string> reasons;
  if (call.dtype == DType::float32)
    reasons.push_back("dtype: tensor-core kernels serve bfloat16 and float16, not float32");
  if (call.capability < 80) {
    reasons.push_back("device: tensor-core kernels need compute capability 8.0, this device has " +
                      std::to_string(call.capability / 10) + "." + std::to_string(call.capability % 10));
  }
  if (!(call.scale > 0)) reasons.push_back("scale: tensor-core kernels need a scale above 0");
  if (call.head_dim > 256 || call.head_dim_v > 256) {
    reasons.push_back("head_dim: tensor-core kernels serve head dims up to 256, not " + std::to_string(call.head_dim) +
                      " and " + std::to_string(call.head_dim_v));
  }
  return reasons;
}

// The family that PACKATTN_CUDA_KERNEL names; none for "auto" and where it is not set.
inline std::optional<Family> forced_family() {
  const char* text = std::getenv("PACKATTN_CUDA_KERNEL");
  const std::string_view value = text == nullptr ? "" : text;
  if (value.empty() || value == "auto") return std::nullopt;
  if (value == "plain") return Family::plain;
  if (value == "sm80") return Family::sm80;
  if (value == "sm90") return Family::sm90;
  throw std::invalid_argument("PACKATTN_CUDA_KERNEL must be auto, plain, sm80 or sm90, got \"" + std::string(value) +
                              "\"");
}

// The kernel for a call that cuda_refusals lets pass. Throws std::invalid_argument if the environment forces a family
// that does not serve it. sm90 takes no expanded tensors: sm80 serves these beside it.
inline Choice select(const Call& call) {
  const std::optional<Family> forced = forced_family();
  if (forced == Family::plain) return {};
  std::vector<std::string> reasons = sm80_refusals(call);
  if (forced == Family::sm90 && call.capability != 90) {
    reasons.push_back("device: sm90 kernels need compute capability 9.0, this device has " +
                      std::to_string(call.capability / 10) + "." + std::to_string(call.capability % 10));
  }
  if (reasons.empty()) {
    const auto first = [&call](Family family, const auto& instantiations) -> Choice {
      for (const HeadDims& dims : instantiations) {
        if (call.head_dim <= dims.head_dim && call.head_dim_v <= dims.head_dim_v) return {family, dims};
      }
      throw std::logic_error("select: no instantiation holds head dims that the family serves");
    };
    if (forced == Family::sm90 && call.mapped) return first(Family::sm90, kHopperHeadDims);
    return first(Family::sm80, kTensorCoreHeadDims);
  }
  if (forced) {
    std::string text = std::string("PACKATTN_CUDA_KERNEL=") + family_name(*forced) + ", but ";
    for (const std::string& reason : reasons) text += (&reason == &reasons.front() ? "" : "; ") + reason;
    throw std::invalid_argument(text);
  }
  return {};
}

}  // namespace packattn::cuda
