// Tensor maps: what a bulk copy (TMA) is told of a tensor. Made on the host, passed to a kernel by value.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "../common/params.h"
#include "launch.cuh"
#include "ptx_sm90.cuh"

namespace packattn::cuda {

// What both kinds of map are made from: dimensions {columns, heads, rows}, strides in bytes of the last two. A
// dimension of size 1 may have any stride, so it gets one that every map takes.
struct TensorMapShape {
  uint64_t size[3];
  uint64_t stride[2];
};

inline TensorMapShape tensor_map_shape(const TensorView& view, int64_t rows, int heads, int columns) {
  constexpr uint64_t kAny = 16;
  return {{static_cast<uint64_t>(columns), static_cast<uint64_t>(heads), static_cast<uint64_t>(rows)},
          {heads > 1 ? static_cast<uint64_t>(view.head_stride) * 2 : kAny,
           rows > 1 ? static_cast<uint64_t>(view.row_stride) * 2 : kAny}};
}

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

// For copies of `box_rows` rows of one head, 64 columns of 16 bits, into shared memory with the 128-byte swizzle.
// What lies outside the tensor is read as 0. A tensor without rows gives a map that nobody may copy with.
// name: of the argument, for errors. Throws std::runtime_error where the driver refuses.
inline TmaMap tensor_map(const char* name, const TensorView& view, int64_t rows, int heads, int columns, int box_rows) {
  TmaMap map{};
  if (rows == 0 || heads == 0) return map;
  const TensorMapShape shape = tensor_map_shape(view, rows, heads, columns);
  const cuuint64_t size[] = {shape.size[0], shape.size[1], shape.size[2]};
  const cuuint64_t stride[] = {shape.stride[0], shape.stride[1]};
  const cuuint32_t box[] = {64, 1, static_cast<cuuint32_t>(box_rows)}, step[] = {1, 1, 1};
  const CUresult result = tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, view.data, size, stride, box,
                                               step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string("CUDA: no tensor map of ") + name + " with " + std::to_string(rows) +
                             " rows, " + std::to_string(heads) + " heads, " + std::to_string(columns) +
                             " columns, strides of " + std::to_string(stride[1]) + " and " + std::to_string(stride[0]) +
                             " bytes: cuTensorMapEncodeTiled gave error " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

#else

inline TmaMap tensor_map(const char*, const TensorView& view, int64_t rows, int heads, int columns, int box_rows) {
  TmaMap map;
  if (rows == 0 || heads == 0) return map;
  const TensorMapShape shape = tensor_map_shape(view, rows, heads, columns);
  map.base = static_cast<const char*>(view.data);
  map.rank = 3;
  map.swizzle = 128;
  for (int i = 0; i < 3; ++i) map.size[i] = shape.size[i];
  map.stride[0] = 2;
  map.stride[1] = shape.stride[0];
  map.stride[2] = shape.stride[1];
  map.box[0] = 64;
  map.box[1] = 1;
  map.box[2] = static_cast<uint32_t>(box_rows);
  return map;
}

#endif

}  // namespace packattn::cuda
