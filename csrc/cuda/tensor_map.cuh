// Tensor maps: what a bulk copy (TMA) is told of a tensor. Made on the host, passed to a kernel by value.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/params.h"
#include "launch.cuh"
#include "ptx_sm90.cuh"

namespace packattn::cuda {

// All that a map is made from, and so the key of those that were made: dimensions {columns, heads, rows}, strides in
// bytes of the last two, the box of a copy. A dimension of size 1 may have any stride, so it gets one that every map
// takes.
struct TensorMapShape {
  void* data;
  uint64_t size[3];
  uint64_t stride[2];
  uint32_t box[3];

  bool operator==(const TensorMapShape&) const = default;
};

inline TensorMapShape tensor_map_shape(const TensorView& view, int64_t rows, int heads, int columns, int box_rows,
                                       int box_heads) {
  constexpr uint64_t kAny = 16;
  return {view.data,
          {static_cast<uint64_t>(columns), static_cast<uint64_t>(heads), static_cast<uint64_t>(rows)},
          {heads > 1 ? static_cast<uint64_t>(view.head_stride) * 2 : kAny,
           rows > 1 ? static_cast<uint64_t>(view.row_stride) * 2 : kAny},
          {64, static_cast<uint32_t>(box_heads), static_cast<uint32_t>(box_rows)}};
}

// The maps that a thread made last. A map is a function of its shape, so none goes stale; making one is a call into the
// driver, and a step of a training asks for the same ones again and again. Direct-mapped: a shape has one place, which
// the last to come keeps.
class TensorMapCache {
 public:
  static constexpr size_t kPlaces = 256;

  // make(shape) is called where the map is not there.
  template <class Make>
  const TmaMap& get(const TensorMapShape& shape, const Make& make) {
    if (places_.empty()) places_.resize(kPlaces);
    Place& place = places_[hash(shape) % kPlaces];
    if (!place.used || !(place.shape == shape)) {
      place.map = make(shape);
      place.shape = shape;
      place.used = true;
    }
    return place.map;
  }

 private:
  struct Place {
    TmaMap map{};
    TensorMapShape shape{};
    bool used = false;
  };

  // FNV-1a over the numbers, with the high half folded in: addresses are multiples of large powers of two.
  static uint64_t hash(const TensorMapShape& shape) {
    uint64_t h = 0xCBF29CE484222325u;
    const auto mix = [&h](uint64_t x) { h = (h ^ x ^ x >> 32) * 0x100000001B3u; };
    mix(reinterpret_cast<uintptr_t>(shape.data));
    for (const uint64_t x : shape.size) mix(x);
    for (const uint64_t x : shape.stride) mix(x);
    for (const uint32_t x : shape.box) mix(x);
    return h ^ h >> 32;
  }

  std::vector<Place> places_;
};

#if defined(__CUDACC__)

// cuTensorMapEncodeTiled, which belongs to the driver: asked for through the runtime, so that nothing links libcuda.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
               "looking for cuTensorMapEncodeTiled");
#else
    check_cuda(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
               "looking for cuTensorMapEncodeTiled");
#endif
    if (found != cudaDriverEntryPointSuccess || function == nullptr) {
      throw std::runtime_error("CUDA: this driver has no cuTensorMapEncodeTiled, which the sm_90a kernels need (12.0)");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

inline TmaMap make_tensor_map(const char* name, const TensorMapShape& shape) {
  TmaMap map{};
  const cuuint64_t size[] = {shape.size[0], shape.size[1], shape.size[2]};
  const cuuint64_t stride[] = {shape.stride[0], shape.stride[1]};
  const cuuint32_t box[] = {shape.box[0], shape.box[1], shape.box[2]}, step[] = {1, 1, 1};
  const CUresult result = tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, shape.data, size, stride, box,
                                               step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string("CUDA: no tensor map of ") + name + " with " + std::to_string(shape.size[2]) +
                             " rows, " + std::to_string(shape.size[1]) + " heads, " + std::to_string(shape.size[0]) +
                             " columns, strides of " + std::to_string(stride[1]) + " and " + std::to_string(stride[0]) +
                             " bytes: cuTensorMapEncodeTiled gave error " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

#else

inline TmaMap make_tensor_map(const char*, const TensorMapShape& shape) {
  TmaMap map;
  map.base = static_cast<const char*>(shape.data);
  map.rank = 3;
  map.swizzle = 128;
  map.stride[0] = 2;
  map.stride[1] = shape.stride[0];
  map.stride[2] = shape.stride[1];
  for (int i = 0; i < 3; ++i) {
    map.size[i] = shape.size[i];
    map.box[i] = shape.box[i];
  }
  return map;
}

#endif

// For copies of `box_rows` rows of `box_heads` heads (row by row), 64 columns of 16 bits, into shared memory with the
// 128-byte swizzle. What lies outside the tensor is read as 0. A tensor without rows gives a map that nobody may copy
// with.
inline TmaMap tensor_map(const char* name, const TensorView& view, int64_t rows, int heads, int columns, int box_rows,
                         int box_heads = 1) {
  if (rows == 0 || heads == 0) return TmaMap{};
  static thread_local TensorMapCache cache;
  return cache.get(tensor_map_shape(view, rows, heads, columns, box_rows, box_heads),
                   [name](const TensorMapShape& shape) { return make_tensor_map(name, shape); });
}

}  // namespace packattn::cuda
