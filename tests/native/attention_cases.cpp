// Runs the CPU attention kernels on calls read from a file, every buffer of exactly the size that the call promises, so
// that a sanitizer sees the first element read or written outside. Checks what holds without an oracle: every
// element of a result is written, rows that see nothing are 0 and -inf, the others finite, and wrong ranges are
// refused.
//
//   attention_cases FILE            one call a line, see read_call; exit status 1 if any call goes wrong
//   attention_cases --isas          the instruction sets that this machine can run, one a line
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/params.h"
#include "cpu/attention.h"
#include "cpu/isa.h"

namespace {

using namespace packattn;

// One line: name dtype layout outcome threads total_q total_k heads_q heads_k head_dim head_dim_v scale softcap sinks,
// then total_q key_begin and total_q key_end. outcome is "served" or "refused".
struct Call {
  std::string name, dtype, layout, outcome;
  int threads = 1;
  int64_t total_q = 0, total_k = 0;
  int32_t heads_q = 0, heads_k = 0, head_dim = 0, head_dim_v = 0;
  float scale = 1, softcap = 0;
  bool sinks = false;
  std::vector<int32_t> begin, end;
};

std::vector<int32_t> read_ints(std::istream& in, int64_t count) {
  std::vector<int32_t> values(count);
  for (int32_t& value : values) in >> value;
  return values;
}

bool read_call(std::istream& in, Call& c) {
  if (!(in >> c.name >> c.dtype >> c.layout >> c.outcome >> c.threads >> c.total_q >> c.total_k >> c.heads_q >>
        c.heads_k >> c.head_dim >> c.head_dim_v >> c.scale >> c.softcap >> c.sinks)) {
    return false;
  }
  c.begin = read_ints(in, c.total_q);
  c.end = read_ints(in, c.total_q);
  if (!in) throw std::runtime_error(c.name + ": the file ends inside the call");
  return true;
}

// A [tokens, heads, dim] tensor in memory of exactly its extent.
class Tokens {
 public:
  Tokens(const Call& call, const std::string& layout, int64_t tokens, int64_t heads, int64_t dim)
      : type_(call.dtype), tokens_(tokens), heads_(heads), dim_(dim) {
    view_.row_stride = heads * dim;
    view_.head_stride = dim;
    if (layout == "sliced") {  // odd strides: no row but the first is aligned
      view_.head_stride = dim + 3;
      view_.row_stride = heads * view_.head_stride + 5;
    } else if (layout == "transposed") {
      view_.row_stride = dim;
      view_.head_stride = tokens * dim;
    } else if (layout == "expanded") {
      view_.row_stride = 0;
    }
    const int64_t extent = tokens == 0 ? 0 : (tokens - 1) * view_.row_stride + (heads - 1) * view_.head_stride + dim;
    const size_t bytes = static_cast<size_t>(extent) * size();
    memory_ = std::make_unique<unsigned char[]>(bytes);
    std::memset(memory_.get(), 0xff, bytes);  // NaN in every dtype: what nobody wrote shows
    view_.data = memory_.get();
  }

  const TensorView& view() const { return view_; }

  void fill(uint32_t seed) {
    each([&](int64_t, int64_t, unsigned char* at) {
      seed = seed * 1664525u + 1013904223u;
      store(at, static_cast<float>(seed >> 8) / 8388608.0f - 1.0f);
    });
  }

  // Whether every element is finite; rows of no key exactly 0.
  bool written(const std::vector<bool>* empty_rows = nullptr) const {
    bool ok = true;
    each([&](int64_t token, int64_t, unsigned char* at) {
      const float value = load(at);
      ok = ok && std::isfinite(value) && (!empty_rows || !(*empty_rows)[token] || value == 0);
    });
    return ok;
  }

 private:
  size_t size() const { return type_ == "float32" ? 4 : 2; }

  template <typename Body>
  void each(const Body& body) const {
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int64_t h = 0; h < heads_; ++h) {
        for (int64_t d = 0; d < dim_; ++d) {
          body(t, h, memory_.get() + (t * view_.row_stride + h * view_.head_stride + d) * size());
        }
      }
    }
  }

  // Coarse conversions: a 16-bit value keeps 3 bits of float32's mantissa, which every 16-bit dtype holds.
  void store(unsigned char* at, float value) const {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    if (type_ == "float32") {
      std::memcpy(at, &bits, 4);
      return;
    }
    const uint32_t sign = bits >> 31, exponent = (bits >> 23) & 255, mantissa = (bits >> 20) & 7;
    uint16_t half = static_cast<uint16_t>(bits >> 16 & 0xfff0);
    if (type_ == "float16") {
      const uint32_t moved = exponent > 112 ? (exponent - 112) << 10 | mantissa << 7 : 0;
      half = static_cast<uint16_t>(sign << 15 | moved);
    }
    std::memcpy(at, &half, 2);
  }

  float load(const unsigned char* at) const {
    uint32_t bits = 0;
    std::memcpy(&bits, at, size());
    if (type_ == "float32") return std::bit_cast<float>(bits);
    if (type_ == "bfloat16") return std::bit_cast<float>(bits << 16);
    // Only 0, finite and not finite matter.
    if ((bits & 0x7c00) == 0x7c00) return std::nanf("");
    return (bits & 0x7fff) == 0 ? 0.0f : 1.0f;
  }

  std::string type_;
  int64_t tokens_, heads_, dim_;
  TensorView view_;
  std::unique_ptr<unsigned char[]> memory_;
};

// Threads of this program's own; an exception of a worker is thrown again here, as the host ops do.
void run_threads(int workers, void (*body)(void* context, int worker), void* context) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(workers);
  for (int worker = 0; worker < workers; ++worker) {
    threads.emplace_back([&, worker] {
      try {
        body(context, worker);
      } catch (...) {
        errors[worker] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

void run_serially(int workers, void (*body)(void* context, int worker), void* context) {
  for (int worker = 0; worker < workers; ++worker) body(context, worker);
}

DType kernel_dtype(const std::string& name) {
  if (name == "float32") return DType::float32;
  if (name == "bfloat16") return DType::bfloat16;
  if (name == "float16") return DType::float16;
  throw std::runtime_error("no kernel dtype " + name);
}

bool refused(const Call& call, const char* direction, const auto& body) {
  try {
    body();
    return false;
  } catch (const std::invalid_argument& error) {
    if (call.outcome == "served") throw std::runtime_error(std::string(direction) + " refused: " + error.what());
    return true;
  }
}

void require(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(what);
}

void run(const Call& c) {
  const float nan = std::nanf("");
  Tokens query(c, c.layout, c.total_q, c.heads_q, c.head_dim), key(c, c.layout, c.total_k, c.heads_k, c.head_dim),
      value(c, c.layout, c.total_k, c.heads_k, c.head_dim_v), dout(c, c.layout, c.total_q, c.heads_q, c.head_dim_v);
  Tokens out(c, "contiguous", c.total_q, c.heads_q, c.head_dim_v),
      dquery(c, "contiguous", c.total_q, c.heads_q, c.head_dim),
      dkey(c, "contiguous", c.total_k, c.heads_k, c.head_dim),
      dvalue(c, "contiguous", c.total_k, c.heads_k, c.head_dim_v);
  uint32_t seed = 1;
  for (Tokens* tokens : {&query, &key, &value, &dout}) tokens->fill(seed++);
  std::vector<float> lse(c.heads_q * c.total_q, nan), dlse(c.heads_q * c.total_q, 0.25f);
  std::vector<float> sinks(c.heads_q, 0.5f), dsinks(c.heads_q, nan);
  std::vector<bool> empty_rows(c.total_q);
  for (int64_t i = 0; i < c.total_q; ++i) empty_rows[i] = c.begin[i] >= c.end[i];

  AttentionBackwardParams p;
  p.total_q = c.total_q;
  p.total_k = c.total_k;
  p.heads_q = c.heads_q;
  p.heads_k = c.heads_k;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.dtype = kernel_dtype(c.dtype);
  p.scale = c.scale;
  p.softcap = c.softcap;
  p.query = query.view();
  p.key = key.view();
  p.value = value.view();
  p.out = out.view();
  p.key_begin = c.begin.data();
  p.key_end = c.end.data();
  p.sinks = c.sinks ? sinks.data() : nullptr;
  p.lse = lse.data();
  p.dout = dout.view();
  p.dlse = dlse.data();
  p.dquery = dquery.view();
  p.dkey = dkey.view();
  p.dvalue = dvalue.view();
  p.dsinks = c.sinks ? dsinks.data() : nullptr;
  const Executor executor{std::abs(c.threads), c.threads > 0 ? &run_threads : &run_serially};

  if (refused(c, "forward", [&] { cpu::attention_forward(p, executor); })) {
    require(refused(c, "backward", [&] { cpu::attention_backward(p, executor); }), "only the forward refused");
    return;
  }
  require(c.outcome == "served", "wrong ranges were served");
  require(out.written(&empty_rows), "out is not written, or not 0 in a row of no key");
  for (int64_t h = 0; h < c.heads_q; ++h) {
    for (int64_t i = 0; i < c.total_q; ++i) {
      const float value = lse[h * c.total_q + i];
      require(empty_rows[i] ? value == -INFINITY : std::isfinite(value), "lse");
    }
  }
  cpu::attention_backward(p, executor);
  require(dquery.written(&empty_rows), "dquery is not written, or not 0 in a row of no key");
  require(dkey.written() && dvalue.written(), "dkey or dvalue is not written");
  for (const float gradient : dsinks) require(!c.sinks || std::isfinite(gradient), "dsinks is not written");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: attention_cases FILE | --isas\n");
    return 2;
  }
  if (std::string(argv[1]) == "--isas") {
    for (const std::string& isa : cpu::available_isas()) std::puts(isa.c_str());
    return 0;
  }
  std::ifstream file(argv[1]);
  int calls = 0, failures = 0;
  for (Call call; read_call(file, call); ++calls) {
    try {
      run(call);
    } catch (const std::exception& error) {
      ++failures;
      std::fprintf(stderr, "%s (%s, %s, threads %d): %s\n", call.name.c_str(), call.dtype.c_str(), call.layout.c_str(),
                   call.threads, error.what());
    }
  }
  std::printf("%s: %d calls, %d failed\n", cpu::isa(), calls, failures);
  return calls == 0 || failures > 0 ? 1 : 0;
}
