// The instruction sets the CPU kernels are compiled for, and the one this process uses.
#pragma once
#include <string>
#include <vector>

namespace packattn::cpu {

// Names of the compiled instruction sets that this machine can run, best first; "portable" is always last.
std::vector<std::string> available_isas();

// The one in use: the environment variable PACKATTN_CPU_ISA if it is set, else the first of available_isas().
// Chosen once. Throws std::runtime_error if the variable names none of available_isas().
const char* isa();

}  // namespace packattn::cpu
