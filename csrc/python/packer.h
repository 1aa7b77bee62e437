// Packing documents into bins of a fixed number of tokens: bookkeeping over lengths, no tensors, no Python.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace packattn {

// Bin b holds the documents order[offsets[b]] ... order[offsets[b + 1] - 1], in the order they lie in it.
struct BinOrder {
  std::vector<int64_t> order;    // [count], every document once
  std::vector<int64_t> offsets;  // [bins + 1]
};

// Distributes `count` documents over bins of `capacity` tokens, 0 <= lengths[i] <= capacity. The algorithm is "bfd",
// "ffd", "next_fit" or "balanced" (packattn.pack describes them); num_bins, at least 1, is where "balanced" starts and
// is ignored by the others. "balanced" opens further bins where those do not hold everything.
// The result depends on nothing but the arguments. Throws std::invalid_argument for arguments other than these.
BinOrder pack(const int64_t* lengths, int64_t count, int64_t capacity, const std::string& algorithm, int64_t num_bins);

}  // namespace packattn
