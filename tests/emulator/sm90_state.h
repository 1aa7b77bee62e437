// What a block has of Hopper's asynchronous machinery.
#pragma once
#include "block.h"

namespace packattn::emu {

class HopperState {
 public:
  explicit HopperState(Block&) {}
  // Lets one bulk copy land, when every thread waits. False if none is under way.
  bool land_one_copy() { return false; }
  void check_end() {}
};

}  // namespace packattn::emu
