// Random and hostile values through every function of csrc/cpu/metadata.h, on buffers of exactly the promised size.
// Each call must refuse (std::invalid_argument) or give offsets that a reader can trust; a sanitizer watches the rest.
//
//   metadata_hostile [rounds]       prints how many calls were answered and refused; exit status 1 for a wrong result
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>

#include "cpu/metadata.h"

namespace {

using namespace packattn::cpu;

std::mt19937_64 generator(20260117);
int64_t answered = 0;
int64_t refused = 0;

int64_t below(int64_t n) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(n)); }

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "wrong result: %s\n", what);
  std::exit(1);
}

template <typename Body>
bool attempt(const Body& body) {
  try {
    body();
    ++answered;
    return true;
  } catch (const std::invalid_argument&) {
    ++refused;
    return false;
  }
}

template <typename Index>
Index hostile() {
  using Limits = std::numeric_limits<Index>;
  const Index values[] = {Limits::min(), Limits::max(), Limits::min() + 1, Limits::max() - 1, Index(-1), Index(0)};
  return below(3) == 0 ? static_cast<Index>(generator()) : values[below(6)];
}

// Values that are mostly what the function expects, with a share of hostile ones in some of the rounds.
template <typename Index, typename Next>
std::vector<Index> values(int64_t count, bool wild, const Next& next) {
  std::vector<Index> result;
  result.reserve(count);
  for (int64_t n = 0; n < count; ++n) {
    const Index value = next();
    result.push_back(wild && below(4) == 0 ? hostile<Index>() : value);
  }
  result.shrink_to_fit();
  return result;
}

void check_offsets(const std::vector<int32_t>& cu, int64_t total) {
  require(!cu.empty() && cu.front() == 0 && cu.back() <= total, "cu_seqlens bounds");
  require(std::is_sorted(cu.begin(), cu.end()), "cu_seqlens order");
}

template <typename Index>
void ids_round(bool wild) {
  const int64_t rows = below(4);
  const int64_t columns = below(12);
  int64_t position = 0;
  const std::vector<Index> segments = values<Index>(rows * columns, wild, [] { return Index(below(3)); });
  const std::vector<Index> positions = values<Index>(rows * columns, wild, [&] {
    position = below(4) == 0 ? 0 : position + 1;
    return Index(position);
  });
  const TokenRows<Index> segment_rows{segments.data(), rows, columns};
  const TokenRows<Index> position_rows{positions.data(), rows, columns};
  const std::optional<int64_t> pads[] = {std::nullopt, 0, std::numeric_limits<int64_t>::min(), hostile<Index>()};
  const std::optional<int64_t> pad = pads[below(4)];
  attempt([&] { check_offsets(cu_seqlens_from_segment_ids(segment_rows, pad), rows * columns); });
  attempt([&] {
    const Documents documents = documents_from_segment_ids(segment_rows, pad);
    require(documents.starts.size() == documents.ends.size(), "as many starts as ends");
    int32_t before = 0;
    for (size_t n = 0; n < documents.starts.size(); ++n) {
      require(before <= documents.starts[n] && documents.starts[n] < documents.ends[n], "document order");
      before = documents.ends[n];
    }
    require(before <= rows * columns, "document bounds");
  });
  for (const BoundaryRule rule : {BoundaryRule::step, BoundaryRule::zero}) {
    attempt([&] {
      const std::vector<int32_t> cu = cu_seqlens_from_position_ids(position_rows, rule);
      check_offsets(cu, rows * columns);
      require(cu.back() == rows * columns, "every token is in a document");
    });
  }
}

template <typename Index>
void offsets_round(bool wild) {
  const int64_t count = below(8);
  const std::vector<Index> lengths = values<Index>(count, wild, [] { return Index(below(5)); });
  std::vector<int32_t> cu(count + 1);
  if (attempt([&] { cu_seqlens_from_lengths(lengths.data(), count, cu.data()); })) check_offsets(cu, cu.back());

  int64_t offset = 0;
  const std::vector<Index> offsets = values<Index>(count, wild, [&] {
    const int64_t value = offset;
    offset += below(5);
    return Index(value);
  });
  const int64_t total = below(30) - 1;
  std::vector<int64_t> positions(std::max<int64_t>(total, 0));
  std::vector<int32_t> segments(std::max<int64_t>(total, 0));
  attempt([&] { position_ids_from_cu_seqlens(offsets.data(), count, total, positions.data()); });
  attempt([&] { segment_ids_from_cu_seqlens(offsets.data(), count, total, segments.data()); });
}

template <typename Index>
struct Side {
  std::vector<Index> starts;
  std::vector<Index> ends;
};

template <typename Index>
Side<Index> documents(int64_t count, bool wild) {
  int64_t at = 0;
  Side<Index> side;
  const auto next = [&] {
    const int64_t value = at;
    at += below(4);
    return Index(value);
  };
  for (int64_t n = 0; n < count; ++n) {
    side.starts.push_back(next());
    side.ends.push_back(next());
  }
  if (wild && count > 0) (below(2) ? side.starts : side.ends)[below(count)] = hostile<Index>();
  side.starts.shrink_to_fit();
  side.ends.shrink_to_fit();
  return side;
}

// document_ranges -> key_ranges -> query_ranges, each also on values that the one before would not give.
template <typename Index>
void ranges_round(bool wild) {
  const int64_t count = below(6);
  const Side<Index> q = documents<Index>(count, wild);
  const Side<Index> k = documents<Index>(count, wild);
  const int64_t total_q = below(40) - 1;
  const int64_t rows = std::max<int64_t>(total_q, 0);
  std::vector<int32_t> begin(rows), end(rows), diagonal(rows), segments(rows);
  const DocumentPairs<Index> pairs{count, q.starts.data(), q.ends.data(), k.starts.data(), k.ends.data()};
  attempt([&] {
    document_ranges(pairs, total_q, {begin.data(), end.data(), diagonal.data(), segments.data()});
    for (int64_t i = 0; i < rows; ++i) {
      require(0 <= begin[i] && begin[i] <= end[i] && segments[i] < count, "document ranges");
    }
  });

  if (wild && below(2)) {
    begin = values<int32_t>(rows, true, [] { return int32_t(below(9)); });
    end = values<int32_t>(rows, true, [] { return int32_t(below(20)); });
    diagonal = values<int32_t>(rows, true, [] { return int32_t(below(20)); });
  }
  const std::vector<int32_t> prefix = values<int32_t>(rows, wild, [] { return int32_t(below(20)); });
  const int64_t sizes[] = {-1, 0, 1, 3, 1'000'000, std::numeric_limits<int64_t>::max()};
  const KeyRangeOptions options{below(2) == 0, sizes[below(6)], sizes[below(6)], sizes[below(5) + 1]};
  std::vector<int32_t> key_begin(rows), key_end(rows);
  attempt([&] {
    key_ranges(begin.data(), end.data(), below(2) ? diagonal.data() : nullptr, below(2) ? prefix.data() : nullptr, rows,
               options, key_begin.data(), key_end.data());
    for (int64_t i = 0; i < rows; ++i) {
      if (begin[i] > end[i]) continue;
      require(begin[i] <= key_begin[i] && key_begin[i] <= key_end[i] && key_end[i] <= end[i], "inside the document");
    }
  });

  const int64_t total_k = below(30) - 1;
  std::vector<int32_t> query_begin(std::max<int64_t>(total_k, 0)), query_end(query_begin.size());
  attempt([&] {
    query_ranges(key_begin.data(), key_end.data(), rows, total_k, query_begin.data(), query_end.data());
    for (size_t j = 0; j < query_begin.size(); ++j) {
      require(0 <= query_begin[j] && query_begin[j] <= query_end[j] && query_end[j] <= rows, "query ranges");
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t rounds = argc > 1 ? std::atoll(argv[1]) : 20000;
  for (int64_t n = 0; n < rounds; ++n) {
    const bool wild = n % 2 == 1;
    ids_round<int32_t>(wild);
    ids_round<int64_t>(wild);
    offsets_round<int32_t>(wild);
    offsets_round<int64_t>(wild);
    ranges_round<int32_t>(wild);
    ranges_round<int64_t>(wild);
  }
  std::printf("%lld answered, %lld refused\n", static_cast<long long>(answered), static_cast<long long>(refused));
  return 0;
}
