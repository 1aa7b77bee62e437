#include "python/packer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <queue>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace packattn {
namespace {

// The documents of at least one token, longest first; equal lengths keep their order. A radix sort, because lengths are
// small numbers: one pass below a capacity of 65,536, two up to 2^32.
std::vector<int64_t> longest_first(const int64_t* lengths, int64_t count, int64_t capacity) {
  constexpr int kDigitBits = 16;
  constexpr int64_t kMask = (int64_t{1} << kDigitBits) - 1;
  std::vector<int64_t> order, other;
  order.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    if (lengths[i] > 0) order.push_back(i);
  }
  other.resize(order.size());
  for (int shift = 0; (capacity >> shift) > 0; shift += kDigitBits) {
    std::vector<int64_t> place(kMask + 2, 0);
    const auto digit = [&](int64_t i) { return ((capacity - lengths[i]) >> shift) & kMask; };
    for (int64_t i : order) ++place[digit(i) + 1];
    for (int64_t d = 0; d < kMask; ++d) place[d + 1] += place[d];
    for (int64_t i : order) other[place[digit(i)]++] = i;
    order.swap(other);
  }
  return order;
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
  DenseSpaces(int64_t capacity, int64_t count) : set_(capacity + 1), first_(capacity + 1, -1), last_(capacity + 1) {
    next_.reserve(count);
  }

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
  SparseSpaces(int64_t, int64_t) {}

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

// Each of the following puts the documents of `sorted` into bins, in this order: it writes bin_of [count] and returns
// the number of bins.

// Best fit: the bin in which the least space would remain (D. S. Johnson, "Near-optimal bin packing algorithms", 1973).
template <class Spaces>
int64_t best_fit(const std::vector<int64_t>& sorted, const int64_t* lengths, int64_t capacity, int64_t* bin_of) {
  Spaces spaces(capacity, sorted.size());
  int64_t bins = 0;
  for (int64_t i : sorted) {
    int64_t space = spaces.at_least(lengths[i]);
    const int64_t bin = space < 0 ? bins++ : spaces.pop(space);
    if (space < 0) space = capacity;
    bin_of[i] = bin;
    if (space > lengths[i]) spaces.push(space - lengths[i], bin);
  }
  return bins;
}

// First fit: the oldest bin with enough space (Johnson, as above), found in a tree of maxima over the bins. Bins not yet
// opened are leaves with all their space, so the search opens one by itself.
int64_t first_fit(const std::vector<int64_t>& sorted, const int64_t* lengths, int64_t capacity, int64_t* bin_of) {
  const int64_t leaves = std::bit_ceil(sorted.size() + 1);
  std::vector<int64_t> most_space(2 * leaves, capacity);
  int64_t bins = 0;
  for (int64_t i : sorted) {
    int64_t node = 1;
    while (node < leaves) node = 2 * node + (most_space[2 * node] < lengths[i]);
    bin_of[i] = node - leaves;
    bins = std::max(bins, bin_of[i] + 1);
    most_space[node] -= lengths[i];
    while (node /= 2) most_space[node] = std::max(most_space[2 * node], most_space[2 * node + 1]);
  }
  return bins;
}

// Next fit: the last bin, or a new one.
int64_t next_fit(const int64_t* lengths, int64_t count, int64_t capacity, int64_t* bin_of) {
  int64_t bins = count > 0 ? 1 : 0;
  int64_t space = capacity;
  for (int64_t i = 0; i < count; ++i) {
    if (space < lengths[i]) {
      ++bins;
      space = capacity;
    }
    space -= lengths[i];
    bin_of[i] = bins - 1;
  }
  return bins;
}

// Longest processing time first (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969) with a document's
// squared length as its time, and a limit on the tokens of a bin: of the bins with enough space, the one of least cost.
int64_t least_cost(const std::vector<int64_t>& sorted, const int64_t* lengths, int64_t capacity, int64_t bins,
                   int64_t* bin_of) {
  using Open = std::tuple<int64_t, int64_t, int64_t>;  // cost, bin, space: the least cost on top
  using Parked = std::tuple<int64_t, int64_t, int64_t>;  // space, -bin, cost: the most space on top
  std::priority_queue<Open, std::vector<Open>, std::greater<>> open;
  std::priority_queue<Parked> parked;
  for (int64_t b = 0; b < bins; ++b) open.emplace(0, b, capacity);
  for (int64_t i : sorted) {
    const int64_t length = lengths[i];
    // Lengths only fall: a bin too full for this document is set aside until the documents are short enough for it.
    for (; !parked.empty() && std::get<0>(parked.top()) >= length; parked.pop()) {
      const auto [space, bin, cost] = parked.top();
      open.emplace(cost, -bin, space);
    }
    for (; !open.empty() && std::get<2>(open.top()) < length; open.pop()) {
      const auto [cost, bin, space] = open.top();
      parked.emplace(space, -bin, cost);
    }
    if (open.empty()) open.emplace(0, bins++, capacity);
    const auto [cost, bin, space] = open.top();
    open.pop();
    bin_of[i] = bin;
    open.emplace(cost + length * length, bin, space - length);
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
  std::vector<int64_t> bin_of(count, -1);
  std::vector<int64_t> sorted;
  int64_t bins = 0;
  if (algorithm == "next_fit") {
    bins = next_fit(lengths, count, capacity, bin_of.data());
  } else {
    sorted = longest_first(lengths, count, capacity);
    if (algorithm == "bfd") {
      const bool dense = capacity <= std::max<int64_t>(1 << 16, count);
      bins = (dense ? best_fit<DenseSpaces> : best_fit<SparseSpaces>)(sorted, lengths, capacity, bin_of.data());
    } else if (algorithm == "ffd") {
      bins = first_fit(sorted, lengths, capacity, bin_of.data());
    } else if (algorithm == "balanced") {
      bins = least_cost(sorted, lengths, capacity, num_bins, bin_of.data());
    } else {
      throw std::invalid_argument("algorithm must be bfd, ffd, next_fit or balanced");
    }
  }
  // Documents of no tokens take no room: those that next_fit did not keep in their place go to the end of the last bin.
  if (count > 0) bins = std::max<int64_t>(bins, 1);
  BinOrder result;
  result.order.resize(count);
  result.offsets.assign(bins + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    if (bin_of[i] < 0) {
      bin_of[i] = bins - 1;
      sorted.push_back(i);
    }
    ++result.offsets[bin_of[i] + 1];
  }
  for (int64_t b = 0; b < bins; ++b) result.offsets[b + 1] += result.offsets[b];
  std::vector<int64_t> place(result.offsets.begin(), result.offsets.end() - 1);
  for (int64_t k = 0; k < count; ++k) {
    const int64_t i = sorted.empty() ? k : sorted[k];
    result.order[place[bin_of[i]]++] = i;
  }
  return result;
}

}  // namespace packattn
