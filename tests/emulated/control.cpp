// What the tests set and read of the emulator inside packattn_emulated.so, as C functions for ctypes.
#include <cstdint>
#include <cstdio>
#include <stdexcept>

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

namespace {

void reads_what_nobody_wrote(int address) { (void)packattn::cuda::ptx::lds32(static_cast<uint32_t>(address)); }

}  // namespace

// Launches a kernel that is wrong, as ops launch theirs. Writes what that throws, "" if nothing.
EXPORTED void packattn_emulator_broken_launch(char* text, int bytes) {
  text[0] = 0;
  try {
    packattn::cuda::launch({nullptr, {3, 80, 1024}}, &reads_what_nobody_wrote, 1, 32, 64, 16);
  } catch (const std::runtime_error& error) {
    std::snprintf(text, static_cast<size_t>(bytes), "%s", error.what());
  }
}
