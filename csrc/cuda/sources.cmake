# The CUDA kernels: PACKATTN_CUDA_SOURCES run on any GPU, PACKATTN_CUDA_TENSOR_CORE_SOURCES need compute capability 8.0.
# The same files make the emulated library of the tests, compiled as C++.
file(GLOB PACKATTN_CUDA_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cu)
file(GLOB PACKATTN_CUDA_TENSOR_CORE_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/instantiations/*.cu)
