// Refusals of Torch-free code, and the one check of key ranges. A host op adds its name to the message.
#pragma once
#include <cstdint>
#include <sstream>
#include <stdexcept>

namespace packattn::cpu {

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// Takes the rows that see anything in order and refuses the first one that is out of place.
class KeyRangeCheck {
 public:
  explicit KeyRangeCheck(int64_t total_k) : total_k_(total_k) {}

  void row(int64_t i, int64_t begin, int64_t end) {
    if (begin < 0) refuse("key_begin must not be negative, got key_begin[", i, "] = ", begin);
    if (end > total_k_) refuse("key_end must be at most total_k = ", total_k_, ", got key_end[", i, "] = ", end);
    if (begin < begin_) refuse_order("key_begin", i, begin, begin_);
    if (end < end_) refuse_order("key_end", i, end, end_);
    begin_ = begin;
    end_ = end;
  }

 private:
  [[noreturn]] static void refuse_order(const char* name, int64_t i, int64_t value, int64_t before) {
    refuse(name, " must be nondecreasing over the rows that see keys, got ", name, "[", i, "] = ", value, " after ",
           before);
  }

  int64_t total_k_;
  int64_t begin_ = 0;
  int64_t end_ = 0;
};

}  // namespace packattn::cpu
