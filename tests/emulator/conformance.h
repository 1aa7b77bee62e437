// What both halves of the conformance program share: device memory, fixed pseudo-random inputs, the lines it prints.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../../csrc/cuda/launch.cuh"

namespace packattn::cuda::conformance {

#if defined(__CUDACC__)
inline Stream stream() { return {nullptr, Device{1, 80, 48 * 1024}}; }

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : count_(values.size()) {
    check_cuda(cudaMalloc(&data_, count_ * sizeof(T)), "memory");
    check_cuda(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* data() const { return static_cast<T*>(data_); }
  std::vector<T> values() const {
    std::vector<T> v(count_);
    check_cuda(cudaMemcpy(v.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "copy");
    return v;
  }

 private:
  size_t count_;
  void* data_ = nullptr;
};
// Whether the GPU runs code for sm_90a.
inline bool is_hopper() {
  cudaDeviceProp properties;
  return cudaGetDeviceProperties(&properties, 0) == cudaSuccess && properties.major == 9;
}
#else
inline Stream stream() { return {nullptr, Device{1, 90, 227 * 1024}}; }

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : buffer_(values.size()) {
    std::memcpy(static_cast<void*>(buffer_.p), values.data(), buffer_.bytes());
  }
  T* data() const { return buffer_.p; }
  std::vector<T> values() const { return std::vector<T>(buffer_.p, buffer_.p + buffer_.n); }

 private:
  emu::Buffer<T> buffer_;
};
inline bool is_hopper() { return true; }
#endif

// The same numbers everywhere: a linear congruential generator, high bits first.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint32_t bits() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state_ >> 32);
  }
  float between(float low, float high) { return low + (high - low) * (static_cast<float>(bits() >> 8) / 16777216.f); }

 private:
  uint64_t state_;
};

inline std::vector<uint32_t> random_bits(size_t count, uint64_t seed) {
  Numbers numbers(seed);
  std::vector<uint32_t> v(count);
  for (uint32_t& x : v) x = numbers.bits();
  return v;
}
inline std::vector<uint32_t> floats(size_t count, uint64_t seed, float low, float high) {
  Numbers numbers(seed);
  std::vector<uint32_t> v(count);
  for (uint32_t& x : v) {
    const float f = numbers.between(low, high);
    std::memcpy(&x, &f, 4);
  }
  return v;
}
// Pairs of 16-bit numbers. Whole ones from -8 to 7: any sum of a few hundred products is exact, in whatever order.
template <class T>
std::vector<uint32_t> halves(size_t count, uint64_t seed, bool whole) {
  Numbers numbers(seed);
  const auto one = [&] {
    const float x = whole ? static_cast<float>(static_cast<int>(numbers.bits() >> 28) - 8) : numbers.between(-2.f, 2.f);
    uint32_t u;  // truncated to the 16-bit type, by hand: no conversion of anyone's is trusted here
    std::memcpy(&u, &x, 4);
    if (!is_f16<T>) return u >> 16;
    if ((u >> 23 & 255) < 113) return uint32_t{0};  // under float16's smallest normal number
    return (u >> 16 & 0x8000u) | ((u >> 13 & 0x3FFFFu) - (112u << 10));
  };
  std::vector<uint32_t> v(count);
  for (uint32_t& x : v) {
    const uint32_t low = one();
    x = low | one() << 16;
  }
  return v;
}

// A line of results that must be equal: "exact NAME HASH" (FNV-1a of the words).
inline void print_exact(const std::string& name, const std::vector<uint32_t>& words) {
  uint64_t hash = 14695981039346656037ull;
  for (const uint32_t w : words) {
    for (int i = 0; i < 4; ++i) hash = (hash ^ (w >> 8 * i & 255)) * 1099511628211ull;
  }
  std::printf("exact %s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
}
// Floats that may differ: "close NAME RELATIVE ABSOLUTE VALUE...", |x - y| <= ABSOLUTE + RELATIVE |y|.
inline void print_close(const std::string& name, const std::vector<uint32_t>& words, double relative, double absolute) {
  std::printf("close %s %g %g", name.c_str(), relative, absolute);
  for (const uint32_t w : words) {
    float f;
    std::memcpy(&f, &w, 4);
    std::printf(" %.9g", static_cast<double>(f));
  }
  std::printf("\n");
}

// What every kernel here gets: thread t reads in[t * reads...] and writes out[t * writes...].
struct Words {
  const uint32_t* in;
  uint32_t* out;
};
inline std::vector<uint32_t> results(void (*kernel)(Words), const std::vector<uint32_t>& in, size_t count, int threads,
                                     int shared_bytes) {
  const DeviceArray<uint32_t> from(in), to(std::vector<uint32_t>(count, 0));
  launch(stream(), kernel, 1, threads, shared_bytes, Words{from.data(), to.data()});
  return to.values();
}

void run_sm90();

}  // namespace packattn::cuda::conformance
