// The buffers in global memory that a kernel may touch. Where any is registered, every access through load_global,
// store_global and asynchronous copies has to lie inside one, AddressSanitizer or not.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define PACKATTN_EMULATOR_ASAN 1
#else
#define PACKATTN_EMULATOR_ASAN 0
#endif

namespace packattn::emu {

inline std::map<uintptr_t, size_t>& buffers() {
  static std::map<uintptr_t, size_t> b;
  return b;
}
inline void register_buffer(const void* data, size_t bytes) { buffers()[reinterpret_cast<uintptr_t>(data)] = bytes; }
inline void forget_buffer(const void* data) { buffers().erase(reinterpret_cast<uintptr_t>(data)); }

inline bool inside_a_buffer(const void* data, size_t bytes) {
#if PACKATTN_EMULATOR_ASAN
  if (__asan_region_is_poisoned(const_cast<void*>(data), bytes)) return false;
#endif
  const auto& known = buffers();
  if (known.empty()) return true;
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto after = known.upper_bound(address);
  if (after == known.begin()) return false;
  --after;
  return address + bytes <= after->first + after->second;
}

// n elements on the heap, registered; not one byte more for AddressSanitizer. Filled with 0xFF: NaN in every float
// type.
template <class T>
struct Buffer {
  T* p = nullptr;
  size_t n = 0;

  explicit Buffer(size_t count) : n(count) {
    p = static_cast<T*>(std::aligned_alloc(256, allocated()));
#if PACKATTN_EMULATOR_ASAN
    ASAN_POISON_MEMORY_REGION(reinterpret_cast<char*>(p) + bytes(), allocated() - bytes());
#endif
    std::memset(static_cast<void*>(p), 0xFF, bytes());
    register_buffer(p, bytes());
  }
  ~Buffer() {
    forget_buffer(p);
#if PACKATTN_EMULATOR_ASAN
    ASAN_UNPOISON_MEMORY_REGION(p, allocated());
#endif
    std::free(p);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T& operator[](size_t i) { return p[i]; }
  const T& operator[](size_t i) const { return p[i]; }
  size_t bytes() const { return n * sizeof(T); }
  size_t allocated() const { return (bytes() / 256 + 1) * 256; }
};

}  // namespace packattn::emu
