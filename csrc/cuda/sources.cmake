# The CUDA kernels: PACKATTN_CUDA_SOURCES run on any GPU, PACKATTN_CUDA_TENSOR_CORE_SOURCES need compute capability 8.0.
# PACKATTN_CUDA_HOPPER_SOURCES are compiled for sm_90a and nothing else, where it is among the architectures.
# The same files make the emulated library of the tests, compiled as C++.
file(GLOB PACKATTN_CUDA_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cu)
file(GLOB PACKATTN_CUDA_TENSOR_CORE_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/instantiations/*.cu)
set(PACKATTN_CUDA_HOPPER_SOURCES ${PACKATTN_CUDA_TENSOR_CORE_SOURCES})
list(FILTER PACKATTN_CUDA_HOPPER_SOURCES INCLUDE REGEX "/hopper_[^/]*$")
list(FILTER PACKATTN_CUDA_TENSOR_CORE_SOURCES EXCLUDE REGEX "/hopper_[^/]*$")
