// What the metadata functions of every device take: the ways a packed row is described. No Torch, no CUDA.
// `Index` is int32_t or int64_t.
#pragma once
#include <cstdint>

namespace packattn {

// Token ids as they come from a collator: `rows` rows of `columns` tokens, one after the other. A row never continues
// the document of the row before.
template <typename Index>
struct TokenRows {
  const Index* data = nullptr;  // [rows, columns], contiguous
  int64_t rows = 0;
  int64_t columns = 0;
};

// Where position ids say that a document starts: where they do not go up by one, or where they are zero (for
// collators that jump inside a document).
enum class BoundaryRule { step, zero };

// Which part of its document a row sees; see key_ranges.
struct KeyRangeOptions {
  bool causal = true;
  int64_t window_left = -1;   // keys before the diagonal, -1: all
  int64_t window_right = -1;  // keys after it, -1: all; a causal row sees none
  int64_t chunk_size = 0;     // 0: no chunks
};

// Larger than any difference of two int32 values: windows are cut to it, so that sums stay in 64 bits.
constexpr int64_t kBeyondAnyRow = int64_t{1} << 33;

// Documents of two token axes, paired by number.
template <typename Index>
struct DocumentPairs {
  int64_t count = 0;
  const Index* starts_q = nullptr;  // [count]
  const Index* ends_q = nullptr;    // [count]
  const Index* starts_k = nullptr;  // [count]
  const Index* ends_k = nullptr;    // [count]
};

// Per query row: its document's keys, the key it is aligned with (bottom-right: the last row of a document with the
// document's last key), and the document's number.
struct DocumentRanges {
  int32_t* begin = nullptr;        // [total_q]
  int32_t* end = nullptr;          // [total_q]
  int32_t* diagonal = nullptr;     // [total_q], may be negative
  int32_t* segment_ids = nullptr;  // [total_q], -1 for rows of no document
};

}  // namespace packattn
