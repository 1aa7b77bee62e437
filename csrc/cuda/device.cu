#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "device.h"
#include "launch.cuh"

namespace packattn::cuda {
namespace {

#if defined(__CUDACC__)

int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, index), "attribute of a device");
  return value;
}

Device ask(int index) {
  Device device;
  device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index);
  device.capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, index) + attribute(cudaDevAttrComputeCapabilityMinor, index);
  device.shared_memory_optin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  return device;
}

#else

// Three multiprocessors, so that a block of a persistent grid takes several work items also in small tests.
// PACKATTN_EMULATED_CAPABILITY: another compute capability than 8.0. Shared memory: CUDA C++ Programming Guide, table
// "Technical Specifications per Compute Capability".
Device ask(int) {
  const char* text = std::getenv("PACKATTN_EMULATED_CAPABILITY");
  const int capability = text == nullptr ? 80 : std::atoi(text);
  static const std::map<int, int> kilobytes{{75, 64}, {80, 163}, {86, 99}, {89, 99}, {90, 227}, {100, 227}, {120, 99}};
  const auto found = kilobytes.find(capability);
  if (found == kilobytes.end()) {
    throw std::invalid_argument("PACKATTN_EMULATED_CAPABILITY must be 75, 80, 86, 89, 90, 100 or 120, got " +
                                std::string(text));
  }
  return {3, capability, found->second * 1024};
}

#endif

}  // namespace

Device device_at(int index) {
#if defined(__CUDACC__)
  static std::mutex mutex;
  static std::map<int, Device> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(index);
  return found != known.end() ? found->second : known.emplace(index, ask(index)).first->second;
#else
  return ask(index);  // tests change it
#endif
}

}  // namespace packattn::cuda
