// The CUDA side of an op: its stream, scratch memory, and the host's copies of values under PACKATTN_VALIDATE.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <cstdlib>
#include <string_view>

#include "../cuda/device.h"
#include "../cuda/workspace.h"
#include "place.h"

namespace packattn::ops {

// Whether PACKATTN_VALIDATE=1 asks to look at values, which waits for the device.
inline bool validates() {
  const char* value = std::getenv("PACKATTN_VALIDATE");
  return value != nullptr && std::string_view(value) == "1";
}

inline cuda::Stream current_stream(const Place& place) {
  cuda::Stream stream;
  stream.device = cuda::device_at(place.index());
#if defined(PACKATTN_BACKEND_CUDA)
  // torch::stable's Stream gives its handle from torch 2.13 on; this function is in every libtorch_cuda.
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(place.index(), &stream.handle));
#endif
  return stream;
}

// Device memory for one call. Freed when the call returns: torch's allocator hands it out again in the stream's order.
class Scratch {
 public:
  Scratch(const Place& place, size_t bytes)
      : memory_(
            place.empty({bytes == 0 ? 0 : static_cast<int64_t>(bytes + cuda::kWorkspaceAlignment)}, ScalarType::Byte)) {
    if (bytes == 0) return;
    const auto address = reinterpret_cast<uintptr_t>(memory_.mutable_data_ptr());
    const uintptr_t mask = cuda::kWorkspaceAlignment - 1;
    data_ = reinterpret_cast<void*>((address + mask) & ~mask);
  }

  void* data() const { return data_; }

 private:
  Tensor memory_;
  void* data_ = nullptr;
};

}  // namespace packattn::ops
