#include "packer.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <stdexcept>
#include <utility>

namespace packattn {
namespace {

// Sorts documents by length, longest first; equal lengths keep their order. A radix sort, because lengths are small
// numbers: of many documents, one pass below a capacity of 65,536 and two up to 2^32; of few, passes over less memory.
void sort_longest_first(std::vector<int64_t>& documents, const int64_t* lengths, int64_t capacity) {
  const int digit_bits = documents.size() < 4096 ? 8 : 16;
  const int64_t digits = int64_t{1} << digit_bits;
  std::vector<int64_t> sorted(documents.size());
  for (int shift = 0; (capacity >> shift) > 0; shift += digit_bits) {
    std::vector<int64_t> place(digits + 1, 0);
    const auto digit = [&](int64_t i) { return ((capacity - lengths[i]) >> shift) & (digits - 1); };
    for (int64_t i : documents) ++place[digit(i) + 1];
    std::partial_sum(place.begin(), place.end(), place.begin());
    for (int64_t i : documents) sorted[place[digit(i)]++] = i;
    documents.swap(sorted);
  }
}

// A set of numbers in [0, size) as a tree of 64-bit words: a bit of a level says whether the word below it holds any.
class BitSet {
 public:
  explicit BitSet(int64_t size) {
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(size, 0);
    } while (size > 1);
  }

  void insert(int64_t x) {
    for (auto& level : levels_) {
      level[x / 64] |= bit(x);
      x /= 64;
    }
  }

  void erase(int64_t x) {
    for (auto& level : levels_) {
      level[x / 64] &= ~bit(x);
      if (level[x / 64] != 0) return;
      x /= 64;
    }
  }

  // The smallest member that is at least x, or -1.
  int64_t at_least(int64_t x) const {
    for (size_t l = 0; l < levels_.size(); ++l) {
      const size_t word = x / 64;
      if (word >= levels_[l].size()) return -1;
      const uint64_t found = levels_[l][word] & (~uint64_t{0} << (x % 64));
      if (found != 0) {
        x = static_cast<int64_t>(word) * 64 + std::countr_zero(found);
        while (l-- > 0) x = x * 64 + std::countr_zero(levels_[l][x]);
        return x;
      }
      x = static_cast<int64_t>(word) + 1;
    }
    return -1;
  }

 private:
  static uint64_t bit(int64_t x) { return uint64_t{1} << (x % 64); }
  std::vector<std::vector<uint64_t>> levels_;
};

// Open bins by the space they have left. Bins of equal space queue up: first come, first served.
// This one has a slot for every possible space ...
class DenseSpaces {
 public:
  explicit DenseSpaces(int64_t capacity) : set_(capacity + 1), first_(capacity + 1, -1), last_(capacity + 1) {}

  int64_t at_least(int64_t space) const { return set_.at_least(space); }

  void push(int64_t space, int64_t bin) {
    if (bin >= static_cast<int64_t>(next_.size())) next_.resize(bin + 1);
    next_[bin] = -1;
    if (first_[space] < 0) {
      first_[space] = bin;
      set_.insert(space);
    } else {
      next_[last_[space]] = bin;
    }
    last_[space] = bin;
  }

  int64_t pop(int64_t space) {
    const int64_t bin = first_[space];
    first_[space] = next_[bin];
    if (first_[space] < 0) set_.erase(space);
    return bin;
  }

 private:
  BitSet set_;
  std::vector<int64_t> first_, last_;  // [capacity + 1], bins; -1: none
  std::vector<int64_t> next_;          // [bins], the next one in the queue; -1: none
};

// ... and this one keeps only those in use, for capacities that dwarf the number of documents.
class SparseSpaces {
 public:
  explicit SparseSpaces(int64_t) {}

  int64_t at_least(int64_t space) const {
    const auto found = queues_.lower_bound(space);
    return found == queues_.end() ? -1 : found->first;
  }

  void push(int64_t space, int64_t bin) { queues_[space].push(bin); }

  int64_t pop(int64_t space) {
    const auto found = queues_.find(space);
    const int64_t bin = found->second.front();
    found->second.pop();
    if (found->second.empty()) queues_.erase(found);
    return bin;
  }

 private:
  std::map<int64_t, std::queue<int64_t>> queues_;
};

// Each of the following puts documents of these sizes, in this order, into bins: it writes bin_of [count] and returns
// the number of bins. All but next_fit want the longest first, and no size of 0.

// Best fit: the bin in which the least space would remain (D. S. Johnson, "Near-optimal bin packing algorithms", 1973).
template <class Spaces>
int64_t best_fit(const std::vector<int64_t>& sizes, int64_t capacity, int64_t* bin_of) {
  Spaces spaces(capacity);
  int64_t bins = 0;
  for (int64_t size : sizes) {
    int64_t space = spaces.at_least(size);
    const int64_t bin = space < 0 ? bins++ : spaces.pop(space);
    if (space < 0) space = capacity;
    if (space > size) spaces.push(space - size, bin);
    *bin_of++ = bin;
  }
  return bins;
}

// First fit: the oldest bin with enough space (Johnson, as above), found in a tree of maxima over the bins. Bins not
// yet opened are leaves with all their space, so the search opens one by itself.
int64_t first_fit(const std::vector<int64_t>& sizes, int64_t capacity, int64_t* bin_of) {
  // A bin is opened for what fits in no other, so two neighbours together hold more than one capacity.
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const int64_t most_bins = std::min<int64_t>(sizes.size(), 2 * (total / capacity) + 2);
  const int64_t leaves = std::bit_ceil(static_cast<uint64_t>(most_bins) + 1);
  std::vector<int64_t> most_space(2 * leaves, capacity);
  int64_t bins = 0;
  for (int64_t size : sizes) {
    int64_t node = 1;
    while (node < leaves) node = 2 * node + (most_space[2 * node] < size);
    const int64_t bin = node - leaves;
    bins = std::max(bins, bin + 1);
    most_space[node] -= size;
    while (node /= 2) most_space[node] = std::max(most_space[2 * node], most_space[2 * node + 1]);
    *bin_of++ = bin;
  }
  return bins;
}

// Next fit: the last bin, or a new one.
int64_t next_fit(const std::vector<int64_t>& sizes, int64_t capacity, int64_t* bin_of) {
  int64_t bins = sizes.empty() ? 0 : 1;
  int64_t space = capacity;
  for (int64_t size : sizes) {
    if (space < size) {
      ++bins;
      space = capacity;
    }
    space -= size;
    *bin_of++ = bins - 1;
  }
  return bins;
}

// A heap of pairs with the least on top, which can change its top in place: half the work of a pop and a push.
class Heap {
 public:
  using Entry = std::pair<int64_t, int64_t>;
  bool empty() const { return entries_.empty(); }
  const Entry& top() const { return entries_.front(); }

  void push(Entry entry) {
    entries_.push_back(entry);
    std::push_heap(entries_.begin(), entries_.end(), std::greater<>());
  }

  void pop() {
    std::pop_heap(entries_.begin(), entries_.end(), std::greater<>());
    entries_.pop_back();
  }

  void replace_top(Entry entry) {
    size_t hole = 0;
    for (size_t child = 1; child < entries_.size(); child = 2 * hole + 1) {
      if (child + 1 < entries_.size() && entries_[child + 1] < entries_[child]) ++child;
      if (entry <= entries_[child]) break;
      entries_[hole] = entries_[child];
      hole = child;
    }
    entries_[hole] = entry;
  }

 private:
  std::vector<Entry> entries_;
};

// Longest processing time first (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969) with a document's
// squared length as its time, and a limit on the tokens of a bin: of the bins with enough space, the one of least cost.
int64_t least_cost(const std::vector<int64_t>& sizes, int64_t capacity, int64_t bins, int64_t* bin_of) {
  std::vector<int64_t> spaces(bins, capacity), costs(bins, 0);
  Heap fitting;   // (cost, bin)
  Heap too_full;  // (-space, bin)
  for (int64_t b = 0; b < bins; ++b) fitting.push({0, b});
  for (int64_t size : sizes) {
    // Sizes only fall: a bin too full for this document is set aside until the documents are short enough for it.
    for (; !too_full.empty() && -too_full.top().first >= size; too_full.pop()) {
      fitting.push({costs[too_full.top().second], too_full.top().second});
    }
    for (; !fitting.empty() && spaces[fitting.top().second] < size; fitting.pop()) {
      too_full.push({-spaces[fitting.top().second], fitting.top().second});
    }
    if (fitting.empty()) {
      fitting.push({0, bins++});
      spaces.push_back(capacity);
      costs.push_back(0);
    }
    const int64_t bin = fitting.top().second;
    spaces[bin] -= size;
    costs[bin] += size * size;
    fitting.replace_top({costs[bin], bin});
    *bin_of++ = bin;
  }
  return bins;
}

}  // namespace

BinOrder pack(const int64_t* lengths, int64_t count, int64_t capacity, const std::string& algorithm, int64_t num_bins) {
  if (capacity < 1 || capacity > int64_t{1} << 31) throw std::invalid_argument("capacity must be in [1, 2^31]");
  if (num_bins < 1) throw std::invalid_argument("num_bins must be at least 1");
  for (int64_t i = 0; i < count; ++i) {
    if (lengths[i] < 0 || lengths[i] > capacity) throw std::invalid_argument("lengths must be in [0, capacity]");
  }
  const bool keep_order = algorithm == "next_fit";
  std::vector<int64_t> documents(count);
  std::iota(documents.begin(), documents.end(), 0);
  int64_t packed = count;  // documents before this place are the algorithm's, those after it have no tokens
  if (!keep_order) {
    sort_longest_first(documents, lengths, capacity);
    while (packed > 0 && lengths[documents[packed - 1]] == 0) --packed;
  }
  std::vector<int64_t> sizes(packed);
  for (int64_t k = 0; k < packed; ++k) sizes[k] = lengths[documents[k]];

  std::vector<int64_t> bin_of(count);  // of documents[k]
  int64_t bins = 0;
  if (keep_order) {
    bins = next_fit(sizes, capacity, bin_of.data());
  } else if (algorithm == "bfd") {
    const bool dense = capacity <= 8 * count;  // what its tables cost is then little
    bins = (dense ? best_fit<DenseSpaces> : best_fit<SparseSpaces>)(sizes, capacity, bin_of.data());
  } else if (algorithm == "ffd") {
    bins = first_fit(sizes, capacity, bin_of.data());
  } else if (algorithm == "balanced") {
    bins = least_cost(sizes, capacity, num_bins, bin_of.data());
  } else {
    throw std::invalid_argument("algorithm must be bfd, ffd, next_fit or balanced");
  }
  // What has no tokens takes no room: it goes to the end of the last bin, unless next_fit kept it in its place.
  if (count > 0) bins = std::max<int64_t>(bins, 1);
  std::fill(bin_of.begin() + packed, bin_of.end(), bins - 1);

  BinOrder result;
  result.order.resize(count);
  result.offsets.assign(bins + 1, 0);
  for (int64_t bin : bin_of) ++result.offsets[bin + 1];
  std::partial_sum(result.offsets.begin(), result.offsets.end(), result.offsets.begin());
  std::vector<int64_t> place(result.offsets.begin(), result.offsets.end() - 1);
  for (int64_t k = 0; k < count; ++k) result.order[place[bin_of[k]]++] = documents[k];
  return result;
}

}  // namespace packattn
