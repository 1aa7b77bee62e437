// Where a kernel runs, for host code that knows no CUDA header.
#pragma once

namespace packattn::cuda {

// What the planning of a launch depends on. Nothing that a kernel computes may depend on it beyond the choice of tiles.
struct Device {
  int multiprocessors = 0;
  int capability = 0;           // compute capability, 80 for 8.0
  int shared_memory_optin = 0;  // bytes of shared memory that one block may have
};

// Of the device with this CUDA index. Throws std::runtime_error where CUDA cannot say.
Device device_at(int index);

struct Stream {
  void* handle = nullptr;  // cudaStream_t; not used by the emulator
  Device device;
};

}  // namespace packattn::cuda
