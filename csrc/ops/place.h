// Which device this build of the ops serves, and what it needs to work there: allocation, the current stream.
//
// One of PACKATTN_BACKEND_CPU, PACKATTN_BACKEND_CUDA, PACKATTN_BACKEND_EMULATED is defined by the build. Emulated is
// the CUDA code on CPU tensors, for the tests.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace packattn::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(PACKATTN_BACKEND_CUDA)
constexpr const char* kDevice = "cuda";
inline bool is_here(const Tensor& tensor) { return tensor.is_cuda(); }
#elif defined(PACKATTN_BACKEND_CPU) || defined(PACKATTN_BACKEND_EMULATED)
constexpr const char* kDevice = "cpu";
inline bool is_here(const Tensor& tensor) { return tensor.is_cpu(); }
#else
#error "the build must define PACKATTN_BACKEND_CPU, PACKATTN_BACKEND_CUDA or PACKATTN_BACKEND_EMULATED"
#endif

// The device of an op's first tensor, made the current one while the op runs.
class Place {
 public:
  explicit Place(const Tensor& first)
#if defined(PACKATTN_BACKEND_CUDA)
      : index_(first.get_device_index()), guard_(index_) {
  }
#else
  {
    (void)first;
  }
#endif

  int32_t index() const { return index_; }

  Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype) const {
#if defined(PACKATTN_BACKEND_CUDA)
    const torch::stable::Device device(torch::headeronly::DeviceType::CUDA, index_);
    return torch::stable::empty({sizes.begin(), sizes.size()}, dtype, std::nullopt, device);
#else
    return torch::stable::empty({sizes.begin(), sizes.size()}, dtype);
#endif
  }

 private:
  int32_t index_ = -1;
#if defined(PACKATTN_BACKEND_CUDA)
  torch::stable::accelerator::DeviceGuard guard_;
#endif
};

}  // namespace packattn::ops
