// The metadata kernels on the emulator: the results of csrc/cpu/metadata.cpp on everything that it accepts, and on
// everything else no access outside buffers of exactly the promised size.
//
//   metadata_test [rounds] [seed]     exit status 1 for a wrong result or any report of the emulator
#include "../../csrc/cpu/metadata.cpp"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "../../csrc/cuda/metadata.cu"

namespace {

using packattn::BoundaryRule;
using packattn::DocumentPairs;
using packattn::DocumentRanges;
using packattn::KeyRangeOptions;
using packattn::TokenRows;
namespace cpu = packattn::cpu;
namespace cuda = packattn::cuda;
namespace emu = packattn::emu;

const cuda::Stream kStream{nullptr, cuda::Device{3, 80, 163 * 1024}};
std::mt19937_64 generator(1);
int64_t answered = 0;
int64_t hostile_calls = 0;

int64_t below(int64_t n) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(n)); }

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "wrong result: %s\n", what);
  std::exit(1);
}

template <typename Index>
Index hostile() {
  using Limits = std::numeric_limits<Index>;
  const Index values[] = {Limits::min(), Limits::max(), Limits::min() + 1, Limits::max() - 1, Index(-1), Index(0)};
  return below(3) == 0 ? static_cast<Index>(generator()) : values[below(6)];
}

// Device memory with these values.
template <typename T>
struct Device : emu::Buffer<T> {
  explicit Device(const std::vector<T>& values) : emu::Buffer<T>(values.size()) {
    std::copy(values.begin(), values.end(), this->p);
  }
  explicit Device(int64_t size) : emu::Buffer<T>(static_cast<size_t>(size)) {}
  std::vector<T> values() const { return std::vector<T>(this->p, this->p + this->n); }
};

struct ScanWorkspace : Device<char> {
  ScanWorkspace() : Device<char>(static_cast<int64_t>(cuda::kScanWorkspaceBytes)) {}
};

// What the CPU gives, or nothing if it refuses.
template <typename Body>
auto accepted(const Body& body) -> std::optional<decltype(body())> {
  try {
    auto result = body();
    ++answered;
    return result;
  } catch (const std::invalid_argument&) {
    ++hostile_calls;
    return std::nullopt;
  }
}

// Values that are mostly what the function expects, with a share of hostile ones in some of the rounds.
template <typename Index, typename Next>
std::vector<Index> values(int64_t count, bool wild, const Next& next) {
  std::vector<Index> result;
  for (int64_t n = 0; n < count; ++n) {
    const Index value = static_cast<Index>(next());
    result.push_back(wild && below(4) == 0 ? hostile<Index>() : value);
  }
  return result;
}

// `all` cut to `size` entries, or filled up with `fill`.
std::vector<int32_t> resized(std::vector<int32_t> all, int64_t size, int32_t fill) {
  all.resize(static_cast<size_t>(size), fill);
  return all;
}

template <typename Index>
void check_ids(int64_t rows, int64_t columns, bool wild, int64_t longest) {
  int64_t id = 0;
  int64_t position = 0;
  const Device<Index> segments(values<Index>(rows * columns, wild, [&] {
    if (below(longest) == 0) id = below(4);
    return id;
  }));
  const Device<Index> positions(values<Index>(rows * columns, wild, [&] {
    position = below(longest) == 0 ? below(3) : position + 1;
    return position;
  }));
  const TokenRows<Index> segment_rows{segments.p, rows, columns};
  const TokenRows<Index> position_rows{positions.p, rows, columns};
  const std::optional<int64_t> pads[] = {std::nullopt, 0, 2, std::numeric_limits<int64_t>::min(), hostile<Index>()};
  const std::optional<int64_t> pad = pads[below(5)];
  ScanWorkspace workspace;
  Device<int32_t> count(1);

  const auto capacity = [](int64_t segments_right) {
    switch (below(4)) {
      case 0: return segments_right;
      case 1: return segments_right > 0 ? below(segments_right) : 0;  // too small
      case 2: return int64_t{0};
      default: return segments_right + below(5000);
    }
  };
  const auto check_cu = [&](const char* what, const std::vector<int32_t>& right, const auto& run) {
    const int64_t segments_right = static_cast<int64_t>(right.size()) - 1;
    const int64_t max_segments = capacity(segments_right);
    Device<int32_t> cu(max_segments + 1);
    const bool counted = below(4) != 0;
    run(max_segments, cu.p, counted ? count.p : nullptr);
    if (counted) require(count[0] == segments_right, "number of segments");
    require(cu.values() == resized(right, max_segments + 1, right.back()), what);
  };
  check_cu("cu_seqlens_from_segment_ids", cpu::cu_seqlens_from_segment_ids(segment_rows, pad),
           [&](int64_t max_segments, int32_t* cu, int32_t* counter) {
             cuda::cu_seqlens_from_segment_ids(segment_rows, pad, max_segments, cu, counter, workspace.p, kStream);
           });
  for (const BoundaryRule rule : {BoundaryRule::step, BoundaryRule::zero}) {
    check_cu("cu_seqlens_from_position_ids", cpu::cu_seqlens_from_position_ids(position_rows, rule),
             [&](int64_t max_segments, int32_t* cu, int32_t* counter) {
               cuda::cu_seqlens_from_position_ids(position_rows, rule, max_segments, cu, counter, workspace.p, kStream);
             });
  }
  const cpu::Documents right = cpu::documents_from_segment_ids(segment_rows, pad);
  const int64_t max_segments = capacity(static_cast<int64_t>(right.starts.size()));
  Device<int32_t> starts(max_segments), ends(max_segments);
  cuda::documents_from_segment_ids(segment_rows, pad, max_segments, starts.p, ends.p, count.p, workspace.p, kStream);
  const int32_t last = right.ends.empty() ? 0 : right.ends.back();
  require(count[0] == static_cast<int32_t>(right.starts.size()), "number of documents");
  require(starts.values() == resized(right.starts, max_segments, last), "starts of documents");
  require(ends.values() == resized(right.ends, max_segments, last), "ends of documents");
  answered += 4;
}

template <typename Index>
void check_lengths(int64_t count, bool wild) {
  const Device<Index> lengths(values<Index>(count, wild, [] { return below(9) < 3 ? 0 : below(70); }));
  Device<int32_t> cu(count + 1);
  ScanWorkspace workspace;
  cuda::cu_seqlens_from_lengths(lengths.p, count, cu.p, workspace.p, kStream);
  std::vector<int32_t> right(static_cast<size_t>(count + 1));
  const auto valid = accepted([&] {
    cpu::cu_seqlens_from_lengths(lengths.p, count, right.data());
    return true;
  });
  if (valid) require(cu.values() == right, "cu_seqlens_from_lengths");
  require(cu[0] == 0 && std::is_sorted(cu.p, cu.p + count + 1), "offsets that go up from 0");
}

template <typename Index>
void check_offsets(int64_t count, bool wild) {
  int64_t offset = 0;
  const Device<Index> cu(values<Index>(count, wild, [&] {
    const int64_t value = offset;
    offset += below(3) == 0 ? 0 : below(300);
    return value;
  }));
  const int64_t total = wild ? below(500) : offset + below(40);
  Device<int64_t> positions(total);
  Device<int32_t> segments(total);
  cuda::position_ids_from_cu_seqlens(cu.p, count, total, positions.p, kStream);
  cuda::segment_ids_from_cu_seqlens(cu.p, count, total, segments.p, kStream);
  std::vector<int64_t> positions_right(static_cast<size_t>(total));
  std::vector<int32_t> segments_right(static_cast<size_t>(total));
  const auto valid = accepted([&] {
    cpu::position_ids_from_cu_seqlens(cu.p, count, total, positions_right.data());
    cpu::segment_ids_from_cu_seqlens(cu.p, count, total, segments_right.data());
    return true;
  });
  if (valid) require(positions.values() == positions_right, "position_ids_from_cu_seqlens");
  if (valid) require(segments.values() == segments_right, "segment_ids_from_cu_seqlens");
  for (const int32_t n : segments.values()) require(n >= -1 && n < std::max<int64_t>(count - 1, 0), "segment number");
}

struct Ranges {
  explicit Ranges(int64_t rows) : begin(rows), end(rows), diagonal(rows), segment_ids(rows) {}
  Device<int32_t> begin, end, diagonal, segment_ids;
  DocumentRanges out() { return {begin.p, end.p, diagonal.p, segment_ids.p}; }
};

void check_patterns(Ranges& ranges, int64_t total_q, bool wild);

// document_ranges -> key_ranges -> query_ranges, each also on values that the one before would not give.
template <typename Index>
void check_documents(int64_t count, bool wild) {
  std::vector<Index> sides[4];
  int64_t totals[2];
  for (int side = 0; side < 2; ++side) {
    int64_t at = 0;
    const auto next = [&] {
      const int64_t value = at;
      at += below(3) == 0 ? 0 : below(60);
      return static_cast<Index>(value);
    };
    for (int64_t n = 0; n < count; ++n) {
      sides[2 * side].push_back(next());
      sides[2 * side + 1].push_back(next());
    }
    totals[side] = at;
  }
  if (wild && count > 0) {
    for (int i = 0; i < 3; ++i) sides[below(4)][static_cast<size_t>(below(count))] = hostile<Index>();
  }
  const int64_t total_q = wild ? below(400) : totals[0] + below(30);
  const Device<Index> starts_q(sides[0]), ends_q(sides[1]), starts_k(sides[2]), ends_k(sides[3]);
  const DocumentPairs<Index> pairs{count, starts_q.p, ends_q.p, starts_k.p, ends_k.p};
  Ranges got(total_q), right(total_q);
  cuda::document_ranges(pairs, total_q, got.out(), kStream);
  const auto valid = accepted([&] {
    cpu::document_ranges(pairs, total_q, right.out());
    return true;
  });
  if (valid) {
    require(got.begin.values() == right.begin.values() && got.end.values() == right.end.values(), "document ranges");
    require(got.diagonal.values() == right.diagonal.values(), "diagonal");
    require(got.segment_ids.values() == right.segment_ids.values(), "document numbers");
  }
  check_patterns(got, total_q, wild);
}

void check_patterns(Ranges& ranges, int64_t total_q, bool wild) {
  if (wild) {
    for (int32_t* x : {ranges.begin.p, ranges.end.p, ranges.diagonal.p}) {
      for (int64_t i = 0; i < total_q; ++i) x[i] = below(6) == 0 ? hostile<int32_t>() : x[i];
    }
  }
  Device<int32_t> prefix_end(total_q);
  for (int64_t i = 0; i < total_q; ++i) {
    prefix_end[i] = wild && below(4) == 0 ? hostile<int32_t>() : ranges.begin[i] / 2 + static_cast<int32_t>(below(20));
  }
  const int64_t sizes[] = {
      -1, 0, 1, below(80), std::numeric_limits<int32_t>::max(), std::numeric_limits<int64_t>::max()};
  const KeyRangeOptions options{below(2) == 0, sizes[below(6)], sizes[below(6)], std::max<int64_t>(sizes[below(6)], 0)};
  const int32_t* diagonal = below(2) == 0 ? ranges.diagonal.p : nullptr;
  const int32_t* prefix = below(3) == 0 ? prefix_end.p : nullptr;
  Device<int32_t> key_begin(total_q), key_end(total_q), begin_right(total_q), end_right(total_q);
  cuda::key_ranges(ranges.begin.p, ranges.end.p, diagonal, prefix, total_q, options, key_begin.p, key_end.p, kStream);
  cpu::key_ranges(ranges.begin.p, ranges.end.p, diagonal, prefix, total_q, options, begin_right.p, end_right.p);
  require(key_begin.values() == begin_right.values() && key_end.values() == end_right.values(), "key_ranges");

  int64_t total_k = below(20);
  for (int64_t i = 0; i < total_q; ++i) {
    if (key_begin[i] >= key_end[i]) {  // such rows may hold anything
      if (below(3) == 0) key_begin[i] = std::max(hostile<int32_t>(), 0), key_end[i] = below(2) == 0 ? 0 : key_begin[i];
    } else if (!wild || key_end[i] < 2000) {
      total_k = std::max<int64_t>(total_k, key_end[i]);
    }
  }
  Device<int32_t> query_begin(total_k), query_end(total_k);
  std::vector<int32_t> query_begin_right(static_cast<size_t>(total_k)), query_end_right(static_cast<size_t>(total_k));
  Device<char> workspace(static_cast<int64_t>(cuda::query_ranges_workspace_bytes(total_q, total_k)));
  cuda::query_ranges(key_begin.p, key_end.p, total_q, total_k, query_begin.p, query_end.p, workspace.p, kStream);
  const auto valid = accepted([&] {
    cpu::query_ranges(key_begin.p, key_end.p, total_q, total_k, query_begin_right.data(), query_end_right.data());
    return true;
  });
  if (valid) require(query_begin.values() == query_begin_right, "query_begin");
  if (valid) require(query_end.values() == query_end_right, "query_end");
  for (int64_t j = 0; j < total_k; ++j) {
    require(0 <= query_begin[j] && query_begin[j] <= query_end[j] && query_end[j] <= total_q, "query range bounds");
  }
}

template <typename Index>
void round(bool wild) {
  const bool long_axis = below(4) == 0;
  const int64_t rows = below(5);
  check_ids<Index>(rows, long_axis ? below(3000) : below(12), wild, 1 + below(long_axis ? 400 : 6));
  check_lengths<Index>(long_axis ? below(6000) : below(8), wild);
  check_offsets<Index>(1 + (long_axis ? below(300) : below(8)), wild);
  check_documents<Index>(long_axis ? below(200) : below(6), wild);
}

template <typename Body>
void must_refuse(const char* what, const Body& body) {
  try {
    body();
  } catch (const std::invalid_argument&) {
    return;
  }
  require(false, what);
}

void refusals() {
  ScanWorkspace workspace;
  Device<int32_t> some(4);
  const TokenRows<int32_t> many{some.p, int64_t{1} << 16, int64_t{1} << 16};
  must_refuse("more tokens than an int32 counts", [&] {
    cuda::cu_seqlens_from_position_ids(many, BoundaryRule::step, 3, some.p, nullptr, workspace.p, kStream);
  });
  must_refuse("a cu_seqlens of no entries", [&] { cuda::segment_ids_from_cu_seqlens(some.p, 0, 4, some.p, kStream); });
  must_refuse("a negative capacity", [&] {
    cuda::cu_seqlens_from_segment_ids(TokenRows<int32_t>{some.p, 1, 4}, {}, -1, some.p, nullptr, workspace.p, kStream);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 60;
  if (argc > 2) generator.seed(static_cast<uint64_t>(std::atoll(argv[2])));
  try {
    refusals();
    // More rounds than there may be spans, so that a block walks several.
    check_ids<int32_t>(1, cuda::kScanRound * cuda::kMaxSpans + 4321, false, 3000);
    check_ids<int64_t>(3, 0, false, 2);
    for (int i = 0; i < rounds; ++i) {
      round<int32_t>(i % 2 == 1);
      round<int64_t>(i % 2 == 1);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("metadata: %lld results right, %lld hostile calls survived\n", static_cast<long long>(answered),
              static_cast<long long>(hostile_calls));
  return 0;
}
