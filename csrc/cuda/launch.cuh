// Starts a kernel: <<<>>> under nvcc, the emulator under any other compiler. The one place that knows the difference.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "device.h"
#include "ptx.cuh"

namespace packattn::cuda {

#if defined(__CUDACC__)

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorName(error) + ": " +
                           cudaGetErrorString(error));
}

inline cudaStream_t native(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

// Starts `kernel` on a one-dimensional grid; does nothing for no blocks. Does not wait for it.
// shared_bytes: dynamic shared memory of a block, at most device.shared_memory_optin.
// RESIDENT: the blocks that a multiprocessor is to hold at a time, as in the kernel's launch bounds; the emulator's
// rules for registers depend on it. Throws std::runtime_error where CUDA refuses.
template <int RESIDENT = 1, typename... Parameters>
void launch(const Stream& stream, void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes,
            const std::type_identity_t<Parameters>&... arguments) {
  if (blocks <= 0) return;
  if (shared_bytes > 48 * 1024) {  // above what every block has without asking
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
               "shared memory of a kernel");
  }
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), static_cast<size_t>(shared_bytes),
           native(stream)>>>(arguments...);
  check_cuda(cudaGetLastError(), "launch of a kernel");
}

// Fills `bytes` bytes of device memory with `value`, in the order of the stream.
inline void fill_bytes(const Stream& stream, void* data, int value, size_t bytes) {
  if (bytes > 0) check_cuda(cudaMemsetAsync(data, value, bytes, native(stream)), "filling memory");
}

#else

// The emulator runs one grid at a time, and autograd calls from threads of its own.
inline std::recursive_mutex& emulator_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

// As above; runs the whole grid before it returns. Throws std::runtime_error with the emulator's reports, if it has
// any.
template <int RESIDENT = 1, typename... Parameters>
void launch(const Stream& stream, void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes,
            const std::type_identity_t<Parameters>&... arguments) {
  if (blocks <= 0) return;
  if (shared_bytes > stream.device.shared_memory_optin) {
    throw std::runtime_error("emulator: a block asks for " + std::to_string(shared_bytes) +
                             " bytes of shared memory, the device has " +
                             std::to_string(stream.device.shared_memory_optin));
  }
  const std::lock_guard<std::recursive_mutex> lock(emulator_mutex());
  emu::launch(
      dim3{static_cast<unsigned>(blocks)}, dim3{static_cast<unsigned>(threads)}, static_cast<size_t>(shared_bytes),
      [&] { kernel(arguments...); }, RESIDENT);
  const std::string reports = emu::take_reports();
  if (!reports.empty()) throw std::runtime_error("emulator: " + reports);
}

inline void fill_bytes(const Stream&, void* data, int value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) static_cast<unsigned char*>(data)[i] = static_cast<unsigned char>(value);
}

#endif

// Starts a persistent grid: as many blocks as run at a time, as registers allow (Shape::kBlocks) and shared memory, of
// which the system takes 1 KB a block.
template <class Shape, typename... Parameters>
void launch_persistent(const Stream& stream, void (*kernel)(Parameters...),
                       const std::type_identity_t<Parameters>&... arguments) {
  const int room = (stream.device.shared_memory_optin + 1024) / (Shape::kSharedBytes + 1024);
  const int blocks = room < Shape::kBlocks ? (room < 1 ? 1 : room) : Shape::kBlocks;
  launch<Shape::kBlocks>(stream, kernel, static_cast<int64_t>(stream.device.multiprocessors) * blocks, Shape::kThreads,
                         Shape::kSharedBytes, arguments...);
}

}  // namespace packattn::cuda
