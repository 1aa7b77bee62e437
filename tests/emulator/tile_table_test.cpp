// The tile table, built by the kernel on the emulator, against one built by plain loops: packings, windows, garbage.
//
//   tile_table_test [rounds] [seed]     exit status 1 for a wrong table or any report of the emulator
#include "../../csrc/cuda/tile_table.cu"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

namespace {

using namespace packattn::cuda;
namespace emu = packattn::emu;

const Stream kStream{nullptr, Device{3, 80, 163 * 1024}};
std::mt19937_64 generator(1);
int64_t below(int64_t n) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(n)); }

[[noreturn]] void fail(const char* name, const char* what, int64_t where) {
  std::fprintf(stderr, "%s: %s (%lld)\n", name, what, static_cast<long long>(where));
  std::exit(1);
}

struct Axis {
  std::vector<int32_t> begin, end;
  int64_t limit = 0;
};

// Tiles in the order of their rows: one table, or (few_tile_rows > 0) what two tables hold, by `few`.
std::vector<Tile> expected(const Axis& axis, int tile_rows, int few_tile_rows = 0, bool few = false) {
  std::vector<Tile> tiles;
  std::vector<bool> goes_to_few;  // of each tile
  size_t component = 0;           // where it starts
  bool few_rows = false;          // it has
  const int32_t limit = static_cast<int32_t>(axis.limit);
  const auto range = [&](size_t i) {
    return std::pair<int32_t, int32_t>{std::max(axis.begin[i], 0), std::min(axis.end[i], limit)};
  };
  for (size_t i = 0; i < axis.begin.size(); ++i) {
    const auto [begin, end] = range(i);
    const bool sees = begin < end;
    bool border = i == 0;
    if (i > 0 && sees) {
      const auto [before_begin, before_end] = range(i - 1);
      border = before_begin >= before_end || begin >= before_end;
    }
    if (border && few_tile_rows > 0) {
      component = i;
      size_t end = i;  // of the rows that see anything
      const auto seen = [&](size_t row) { return row < axis.begin.size() && range(row).first < range(row).second; };
      while (seen(end) && (end == i || range(end).first < range(end - 1).second)) ++end;
      few_rows = end - i <= kFewRows;
    }
    const bool now_few = few_rows && i - component < kFewRows;
    if (border || tiles.back().rows == (now_few ? few_tile_rows : tile_rows) || now_few != goes_to_few.back()) {
      tiles.push_back({static_cast<int32_t>(i), 0, 0, 0});
      goes_to_few.push_back(now_few);
    }
    Tile& tile = tiles.back();
    if (sees) {
      const bool first = tile.begin >= tile.end;
      tile.begin = first ? begin : std::min(tile.begin, begin);
      tile.end = first ? end : std::max(tile.end, end);
    }
    ++tile.rows;
  }
  std::vector<Tile> chosen;
  for (size_t i = 0; i < tiles.size(); ++i) {
    if (few_tile_rows == 0 || goes_to_few[i] == few) chosen.push_back(tiles[i]);
  }
  return chosen;
}

void compare(const char* name, const TileTable& table, const std::vector<Tile>& right) {
  if (table.count[0] != static_cast<int32_t>(right.size())) fail(name, "number of tiles", table.count[0]);
  std::vector<Tile> got(table.tiles, table.tiles + right.size());
  for (size_t i = 1; i < got.size(); ++i) {
    const int64_t before = got[i - 1].end - got[i - 1].begin, now = got[i].end - got[i].begin;
    if (now > before + before / 8) fail(name, "not the longest first", static_cast<int64_t>(i));
    // Costs that are surely of one class stay in the order of their rows.
    if (now == before && got[i].row < got[i - 1].row) fail(name, "not stable", static_cast<int64_t>(i));
  }
  std::sort(got.begin(), got.end(), [](const Tile& a, const Tile& b) { return a.row < b.row; });
  for (size_t i = 0; i < right.size(); ++i) {
    if (got[i].row != right[i].row || got[i].rows != right[i].rows) fail(name, "rows of tile", right[i].row);
    if (got[i].begin != right[i].begin || got[i].end != right[i].end) fail(name, "range of tile", right[i].row);
  }
}

// Checks one axis, as one table and as two; returns the number of tiles of the one.
int64_t check(const char* name, const Axis& axis, int tile_rows) {
  const int64_t rows = static_cast<int64_t>(axis.begin.size());
  const int64_t shift = below(4);  // addresses that allow vector loads and such that do not
  emu::Buffer<int32_t> begin(static_cast<size_t>(rows + shift)), end(static_cast<size_t>(rows + shift)), count(2);
  emu::Buffer<Tile> tiles(static_cast<size_t>(rows)), scratch(static_cast<size_t>(rows)),
      few_tiles(static_cast<size_t>(rows));
  std::copy(axis.begin.begin(), axis.begin.end(), begin.p + shift);
  std::copy(axis.end.begin(), axis.end.end(), end.p + shift);
  const TileTable table{count.p, tiles.p, scratch.p}, few{count.p + 1, few_tiles.p, nullptr};
  build_tile_table(begin.p + shift, end.p + shift, rows, axis.limit, tile_rows, table, kStream);
  compare(name, table, expected(axis, tile_rows));
  const int32_t number = count[0];

  const int few_tile_rows = 1 << below(7);
  build_tile_tables(begin.p + shift, end.p + shift, rows, axis.limit, tile_rows, table, few_tile_rows, few, kStream);
  compare(name, table, expected(axis, tile_rows, few_tile_rows, false));
  compare(name, few, expected(axis, tile_rows, few_tile_rows, true));
  return number;
}

// window < 0: none. Lengths below 0 are rows of no document, which hold the end of the document before them.
Axis packing(const std::vector<int64_t>& lengths, bool causal, int64_t window) {
  Axis axis;
  int64_t start = 0;
  for (const int64_t length : lengths) {
    const int64_t stop = start + std::abs(length);
    for (int64_t i = start; i < stop; ++i) {
      const int64_t low = window < 0 ? start : std::max(start, i - window);
      axis.begin.push_back(static_cast<int32_t>(length < 0 ? start : low));
      axis.end.push_back(static_cast<int32_t>(length < 0 ? start : causal ? i + 1 : stop));
    }
    start = stop;
  }
  axis.limit = start;
  return axis;
}

int32_t hostile() {
  using Limits = std::numeric_limits<int32_t>;
  const int32_t values[] = {Limits::min(), Limits::max(), Limits::min() + 1, Limits::max() - 1, -1, 0};
  return below(3) == 0 ? static_cast<int32_t>(generator()) : values[below(6)];
}

void fuzz() {
  std::vector<int64_t> lengths;
  const int64_t total = below(4) == 0 ? below(20000) : below(700);
  const int64_t longest = int64_t{1} << below(11);
  for (int64_t sum = 0; sum < total; sum += std::abs(lengths.back())) {
    lengths.push_back(below(6) == 0 ? -below(40) : below(longest) + (below(9) == 0 ? 0 : 1));
    if (lengths.back() == 0) lengths.back() = 1;
  }
  Axis axis = packing(lengths, below(3) != 0, below(2) == 0 ? -1 : below(200));
  const int kind = static_cast<int>(below(4));
  if (kind == 1) axis.limit = below(axis.limit + 1);  // ranges that reach past the end
  for (size_t i = 0; i < axis.begin.size(); ++i) {
    if (kind == 2 && below(5) == 0) (below(2) == 0 ? axis.begin : axis.end)[i] = hostile();
    if (kind == 3) axis.begin[i] = hostile(), axis.end[i] = hostile();
  }
  const int sizes[] = {1, 3, 16, 64, 128};
  check("fuzz", axis, sizes[below(5)]);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 40;
  if (argc > 2) generator.seed(static_cast<uint64_t>(std::atoll(argv[2])));
  try {
    check("no rows", {}, 64);
    check("one row", packing({1}, true, -1), 64);
    check("nothing seen", packing({-700}, true, -1), 64);
    if (check("one document", packing({4096}, true, -1), 128) != 32) fail("one document", "tiles", 0);
    if (check("small documents", packing(std::vector<int64_t>(60, 34), true, -1), 64) != 60) fail("small", "tiles", 0);
    check("every length", packing({1, 63, 64, 65, 127, 128, 129, -5, 7, 2, 1, 1, 8, 9}, false, -1), 64);
    check("window", packing({300, 40, 500}, true, 31), 64);
    check("window of one key", packing({3, 40, 2}, true, 0), 64);
    check("rounds of a block", packing({9000, 3, 8192, 100}, true, -1), 128);
    check("around few rows", packing({63, 64, 65, 66, -3, 63, -70, 64, -300, 65, -64, 1, -1, 64, -64}, false, -1), 128);
    check("few rows at the end of a round", packing({8170, 64, 8120, 65, 8100, 40, -200, 7900, 64}, true, -1), 192);
    check("few rows after nothing", packing({-200, 10, -500}, true, -1), 128);
    for (int i = 0; i < rounds; ++i) fuzz();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("tile table: %d random axes, all right\n", rounds);
  return 0;
}
