// The range of keys that a row sees, made safe: whatever the metadata holds, nobody looks outside [0, limit].
#pragma once
#include <climits>
#include <cstdint>

#include "ptx.cuh"

namespace packattn::cuda {

// One row's range, clamped to [0, limit]; {INT_MAX, 0}, which spans nothing, if it is empty.
struct RowRange {
  int32_t begin;
  int32_t end;
  PACKATTN_DEVICE static RowRange clamped(int32_t begin, int32_t end, int32_t limit) {
    const int32_t first = begin < 0 ? 0 : begin;
    const int32_t last = end > limit ? limit : end;
    return first < last ? RowRange{first, last} : RowRange{INT_MAX, 0};
  }
  PACKATTN_DEVICE bool empty() const { return begin >= end; }
  // Whether a component starts here (tile_table.cuh). An empty row before ends at 0, so it does.
  PACKATTN_DEVICE bool borders(const RowRange& before) const { return !empty() && begin >= before.end; }
};

}  // namespace packattn::cuda
