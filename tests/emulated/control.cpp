// What the tests set and read of the emulator inside packattn_emulated.so, as C functions for ctypes.
#include <cstdint>

#include "cuda/launch.cuh"

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The order in which threads and blocks run; see Config in report.h.
EXPORTED void packattn_emulator_schedule(uint64_t seed, int policy) {
  packattn::emu::config().seed = seed;
  packattn::emu::config().policy = policy;
}

// Blocks run since the last call: nothing, if no kernel ran.
EXPORTED uint64_t packattn_emulator_take_blocks() {
  const uint64_t blocks = packattn::emu::report().counters.blocks;
  packattn::emu::report().clear();
  return blocks;
}
