// Cuts one allocation into aligned parts. The same walk, over no memory, tells how many bytes it takes.
#pragma once
#include <cstddef>
#include <cstdint>

namespace packattn::cuda {

constexpr size_t kWorkspaceAlignment = 256;

class Workspace {
 public:
  // memory: aligned to kWorkspaceAlignment, or nullptr to count only.
  explicit Workspace(void* memory) : memory_(static_cast<char*>(memory)) {}

  // The next part; nullptr where this only counts.
  void* take(size_t bytes) {
    char* part = memory_ == nullptr ? nullptr : memory_ + bytes_;
    bytes_ += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return part;
  }

  template <typename T>
  T* take_array(int64_t count) {
    return static_cast<T*>(take(static_cast<size_t>(count) * sizeof(T)));
  }

  size_t bytes() const { return bytes_; }

 private:
  char* memory_;
  size_t bytes_ = 0;
};

}  // namespace packattn::cuda
