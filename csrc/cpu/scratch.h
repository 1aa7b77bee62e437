// The memory of one call. Small workspaces are kept by the calling thread, because fresh pages cost more than the
// work of a small call; larger ones are freed with the call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace packattn::cpu {

class Workspace {
 public:
  // What a thread keeps between calls, at most: 8 MiB.
  static constexpr size_t kKeptFloats = size_t{2} << 20;

  explicit Workspace(size_t floats) {
    Kept& kept = this_thread();
    if (floats <= kKeptFloats && !kept.in_use) {
      if (kept.floats < floats) {
        kept.memory.reset();
        kept.floats = 0;
        kept.memory = allocate(floats);
        kept.floats = floats;
      }
      kept.in_use = true;
      keeper_ = &kept;
      next_ = kept.memory.get();
    } else {
      own_ = allocate(floats);
      next_ = own_.get();
    }
  }
  ~Workspace() {
    if (keeper_) keeper_->in_use = false;
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // The next piece, 64-byte aligned and uninitialised. The pieces must fit in what the constructor was given; count
  // each with padded().
  float* take(size_t floats) {
    float* piece = next_;
    next_ += padded(floats);
    return piece;
  }
  static constexpr size_t padded(size_t floats) { return (floats + 15) & ~size_t{15}; }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  using Memory = std::unique_ptr<float, Free>;
  struct Kept {
    Memory memory;
    size_t floats = 0;
    bool in_use = false;  // an executor may run another call on a thread that waits for this one
  };
  static Memory allocate(size_t floats) {
    return Memory(static_cast<float*>(::operator new(floats * sizeof(float) + 64, std::align_val_t{64})));
  }
  static Kept& this_thread() {
    thread_local Kept kept;
    return kept;
  }

  Memory own_;
  Kept* keeper_ = nullptr;
  float* next_;
};

}  // namespace packattn::cpu
