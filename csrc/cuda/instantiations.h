// The table of the tensor-core instantiations. Each function stands in a file of its name in instantiations/.
#pragma once
#include <stdexcept>

#include "kernels.h"
#include "select.h"

namespace packattn::cuda {

ForwardKernel forward_bfloat16_64_64();
ForwardKernel forward_bfloat16_96_96();
ForwardKernel forward_bfloat16_128_128();
ForwardKernel forward_bfloat16_192_128();
ForwardKernel forward_bfloat16_256_256();
ForwardKernel forward_float16_64_64();
ForwardKernel forward_float16_96_96();
ForwardKernel forward_float16_128_128();
ForwardKernel forward_float16_192_128();
ForwardKernel forward_float16_256_256();

BackwardKernel backward_bfloat16_64_64();
BackwardKernel backward_bfloat16_96_96();
BackwardKernel backward_bfloat16_128_128();
BackwardKernel backward_bfloat16_192_128();
BackwardKernel backward_bfloat16_256_256();
BackwardKernel backward_float16_64_64();
BackwardKernel backward_float16_96_96();
BackwardKernel backward_float16_128_128();
BackwardKernel backward_float16_192_128();
BackwardKernel backward_float16_256_256();

struct Instantiation {
  DType dtype;
  HeadDims dims;
  ForwardKernel (*forward)();
  BackwardKernel (*backward)();
};

constexpr Instantiation kInstantiations[] = {
    {DType::bfloat16, {64, 64}, &forward_bfloat16_64_64, &backward_bfloat16_64_64},
    {DType::bfloat16, {96, 96}, &forward_bfloat16_96_96, &backward_bfloat16_96_96},
    {DType::bfloat16, {128, 128}, &forward_bfloat16_128_128, &backward_bfloat16_128_128},
    {DType::bfloat16, {192, 128}, &forward_bfloat16_192_128, &backward_bfloat16_192_128},
    {DType::bfloat16, {256, 256}, &forward_bfloat16_256_256, &backward_bfloat16_256_256},
    {DType::float16, {64, 64}, &forward_float16_64_64, &backward_float16_64_64},
    {DType::float16, {96, 96}, &forward_float16_96_96, &backward_float16_96_96},
    {DType::float16, {128, 128}, &forward_float16_128_128, &backward_float16_128_128},
    {DType::float16, {192, 128}, &forward_float16_192_128, &backward_float16_192_128},
    {DType::float16, {256, 256}, &forward_float16_256_256, &backward_float16_256_256},
};

inline const Instantiation& instantiation(DType dtype, const HeadDims& dims) {
  for (const Instantiation& one : kInstantiations) {
    if (one.dtype == dtype && one.dims.head_dim == dims.head_dim && one.dims.head_dim_v == dims.head_dim_v) return one;
  }
  throw std::logic_error("no tensor-core kernel was compiled for what select() chose");
}

// Those for sm_90a, in files of their own: they are compiled for that architecture alone, if it is built for
// (PACKATTN_CUDA_SM90A), and always in the emulated library.
ForwardKernel hopper_forward_bfloat16_64_64();
ForwardKernel hopper_forward_bfloat16_128_128();
ForwardKernel hopper_forward_bfloat16_192_128();
ForwardKernel hopper_forward_bfloat16_256_256();
ForwardKernel hopper_forward_float16_64_64();
ForwardKernel hopper_forward_float16_128_128();
ForwardKernel hopper_forward_float16_192_128();
ForwardKernel hopper_forward_float16_256_256();

BackwardKernel hopper_backward_bfloat16_64_64();
BackwardKernel hopper_backward_bfloat16_128_128();
BackwardKernel hopper_backward_bfloat16_192_128();
BackwardKernel hopper_backward_bfloat16_256_256();
BackwardKernel hopper_backward_float16_64_64();
BackwardKernel hopper_backward_float16_128_128();
BackwardKernel hopper_backward_float16_192_128();
BackwardKernel hopper_backward_float16_256_256();

#if defined(PACKATTN_CUDA_SM90A) || !defined(__CUDACC__)
constexpr Instantiation kHopperInstantiations[] = {
    {DType::bfloat16, {64, 64}, &hopper_forward_bfloat16_64_64, &hopper_backward_bfloat16_64_64},
    {DType::bfloat16, {128, 128}, &hopper_forward_bfloat16_128_128, &hopper_backward_bfloat16_128_128},
    {DType::bfloat16, {192, 128}, &hopper_forward_bfloat16_192_128, &hopper_backward_bfloat16_192_128},
    {DType::bfloat16, {256, 256}, &hopper_forward_bfloat16_256_256, &hopper_backward_bfloat16_256_256},
    {DType::float16, {64, 64}, &hopper_forward_float16_64_64, &hopper_backward_float16_64_64},
    {DType::float16, {128, 128}, &hopper_forward_float16_128_128, &hopper_backward_float16_128_128},
    {DType::float16, {192, 128}, &hopper_forward_float16_192_128, &hopper_backward_float16_192_128},
    {DType::float16, {256, 256}, &hopper_forward_float16_256_256, &hopper_backward_float16_256_256},
};
#endif

// Throws std::runtime_error where this build has none.
inline const Instantiation& hopper_instantiation(DType dtype, const HeadDims& dims) {
#if defined(PACKATTN_CUDA_SM90A) || !defined(__CUDACC__)
  for (const Instantiation& one : kHopperInstantiations) {
    if (one.dtype == dtype && one.dims.head_dim == dims.head_dim && one.dims.head_dim_v == dims.head_dim_v) return one;
  }
#else
  static_cast<void>(dtype), static_cast<void>(dims);
#endif
  throw std::runtime_error(
      "PACKATTN_CUDA_KERNEL=sm90, but this packattn was built without 9.0a in TORCH_CUDA_ARCH_LIST");
}

inline const Instantiation& instantiation(DType dtype, const Choice& choice) {
  return choice.family == Family::sm90 ? hopper_instantiation(dtype, choice.instantiation)
                                       : instantiation(dtype, choice.instantiation);
}
inline ForwardKernel forward_kernel(DType dtype, const Choice& choice) {
  return instantiation(dtype, choice).forward();
}
inline BackwardKernel backward_kernel(DType dtype, const Choice& choice) {
  return instantiation(dtype, choice).backward();
}

}  // namespace packattn::cuda
