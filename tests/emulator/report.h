// What the emulator has found wrong, what it has counted, and how it is set.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <source_location>
#include <string>
#include <tuple>

namespace packattn::emu {

// Where in a kernel something was called. Wrappers take it as a default argument, which the compiler fills in with the
// place of the call: one pointer, so that memory can be shadowed with it.
using Site = std::source_location;

inline const char* file_name(Site site) {
  const char* slash = std::strrchr(site.file_name(), '/');
  return slash ? slash + 1 : site.file_name();
}
inline std::string place(Site site) {
  return site.line() ? std::string(file_name(site)) + ":" + std::to_string(site.line()) : std::string();
}
inline bool same(Site a, Site b) {
  if (std::memcmp(&a, &b, sizeof(Site)) == 0) return true;
  return a.line() == b.line() && a.column() == b.column() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

enum Kind : int {
  kRace,           // two accesses, one of them a write, with no barrier between, in shared memory
  kGlobalRace,     // the same in global memory; of two blocks in one launch nothing is ordered
  kAsync,          // memory touched that an asynchronous copy may still write
  kUninitialised,  // shared memory read that this block never wrote
  kOutOfBounds,
  kMisaligned,
  kDeadlock,    // threads that never finish
  kDivergence,  // lanes of a warp (threads of a block) at different collectives (barriers)
  kLeftover,    // asynchronous work that nobody waited for when the block ended
  kProxy,       // sm_90: generic writes read by the asynchronous proxy without a fence
  kProtocol,    // sm_90: mbarrier, wgmma and register rules
  kKinds
};
inline const char* name(Kind kind) {
  static const char* const names[kKinds] = {"race",          "global-race", "async-not-waited", "uninitialised",
                                            "out-of-bounds", "misaligned",  "deadlock",         "divergence",
                                            "async-at-exit", "proxy-fence", "protocol"};
  return names[kind];
}

struct Counters {
  uint64_t blocks = 0, switches = 0, block_barriers = 0, warp_barriers = 0, shuffles = 0;
  uint64_t async_copies = 0, ldmatrix = 0, mma = 0, tma = 0, wgmma = 0;
  uint64_t bank_conflicts = 0;  // extra passes over shared memory that ldmatrix needs
};

struct Config {
  uint64_t seed = 1;
  // Which thread runs next when one has to wait. 0: the lowest lane of the same warp that can, then the next warp; 1:
  // the highest, then the warp before; 2: any, at random. Blocks run in ascending, descending and random order.
  int policy = 0;
  bool race_check = true;             // of shared and global memory
  uint64_t report_cap = 200;          // a launch is abandoned after so many; a broken kernel would make millions
  size_t shared_memory = 227 * 1024;  // the most a block may have

  static Config from_environment() {
    Config c;
    if (const char* seed = std::getenv("PACKATTN_EMULATOR_SEED")) c.seed = std::strtoull(seed, nullptr, 10);
    if (const char* policy = std::getenv("PACKATTN_EMULATOR_POLICY")) c.policy = std::atoi(policy);
    return c;
  }
};

// All findings since the last clear(). Findings of one kind at one pair of places are one entry with a count.
struct Report {
  struct Entry {
    uint64_t count = 0;
    std::string text;  // of the first
  };
  std::map<std::tuple<int, std::string, std::string>, Entry> entries;
  uint64_t count[kKinds] = {};
  Counters counters;

  uint64_t total() const {
    uint64_t sum = 0;
    for (uint64_t c : count) sum += c;
    return sum;
  }
  void clear() { *this = Report{}; }
  // One line per entry, at most `most`; "" if there is none.
  std::string text(size_t most = 20) const {
    std::string all;
    size_t n = 0;
    for (const auto& [key, entry] : entries) {
      if (n++ == most) return all + "  ...\n";
      all += std::string("  ") + name(static_cast<Kind>(std::get<0>(key))) + " x" + std::to_string(entry.count) + ": " +
             entry.text + "\n";
    }
    return all;
  }
};

inline Config configuration = Config::from_environment();
inline Report the_report;
inline Config& config() { return configuration; }
inline Report& report() { return the_report; }

// The text of all findings so far, "" if there is none, and starts afresh.
inline std::string take_reports() {
  const uint64_t total = report().total();
  if (total == 0) return "";
  std::string text = std::to_string(total) + " reports\n" + report().text();
  report().clear();
  return text;
}

// Records a finding of the running block. Returns, unless that was one too many: then the block is abandoned.
// other: the place of the access that this one conflicts with, if any.
void complain(Kind kind, Site site, Site other, const char* format, ...) __attribute__((format(printf, 4, 5)));

}  // namespace packattn::emu
