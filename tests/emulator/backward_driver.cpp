// The tensor-core backward on the emulator, against sums in double: numbers, bits of a document alone and packed, NaN
// of one document in another, schedules, and memory under any metadata.
//
//   backward_driver (hopper_backward_driver for sm_90a) [rounds of random cases] [seed] [name of the one case to run]
//   exit status 1 for a wrong number, a bit that differs, or any report of the emulator
//
// An element passes if |error| <= u (sum of |terms| + |wanted|) + 1e-5 (1 + sum of |terms|), u the rounding unit of the
// dtype: weights are rounded once before they are multiplied, results once in the end.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention_cases.h"
#ifdef BACKWARD_DRIVER_HOPPER  // hopper_backward_driver.cpp
#include "hopper_backward_launch.cuh"
#else
#include "attention_backward_launch.cuh"
#endif
#include "tile_table.cu"

namespace {

using namespace packattn::cases;
using packattn::AttentionBackwardParams;
using packattn::DType;
using packattn::TensorView;
namespace emu = packattn::emu;

#ifdef BACKWARD_DRIVER_HOPPER
template <class T, int D, int DV>
using Launch = HopperBackwardLaunch<T, D, DV>;
#else
template <class T, int D, int DV>
using Launch = BackwardLaunch<T, D, DV>;
#endif

// The rows that see each key, as torch.ops.packattn.query_ranges defines it.
Ranges query_ranges(const Ranges& keys) {
  Ranges r;
  r.begin.assign(static_cast<size_t>(keys.keys), 0);
  r.end.assign(static_cast<size_t>(keys.keys), 0);
  r.keys = static_cast<int64_t>(keys.begin.size());
  for (size_t i = keys.begin.size(); i-- > 0;) {
    for (int32_t j = keys.begin[i]; j < keys.end[i]; ++j) {
      const auto key = static_cast<size_t>(j);
      if (r.end[key] == 0) r.end[key] = static_cast<int32_t>(i) + 1;
      r.begin[key] = static_cast<int32_t>(i);
    }
  }
  return r;
}

template <class T>
struct Problem {
  const Case& c;
  Ranges keys, queries;
  int64_t tq, tk;
  Tensor q, k, v, out, dout, dq, dk, dv;
  emu::Buffer<float> lse, dlse, sinks, dsinks;
  emu::Buffer<int32_t> begin, end, query_begin, query_end;

  explicit Problem(const Case& one)
      : c(one),
        keys(key_ranges(one)),
        queries(query_ranges(keys)),
        tq(queries.keys),
        tk(keys.keys),
        q(tq, c.heads_q, c.dim, c.layout),
        k(tk, c.heads_k, c.dim, c.layout),
        v(tk, c.heads_k, c.dim_v, c.layout),
        out(tq, c.heads_q, c.dim_v, c.layout),
        dout(tq, c.heads_q, c.dim_v, c.layout),
        dq(tq, c.heads_q, c.dim, c.layout),
        dk(tk, c.heads_k, c.dim, c.layout),
        dv(tk, c.heads_k, c.dim_v, c.layout),
        lse(static_cast<size_t>(c.heads_q * tq)),
        dlse(static_cast<size_t>(c.heads_q * tq)),
        sinks(static_cast<size_t>(c.heads_q)),
        dsinks(static_cast<size_t>(c.heads_q)),
        begin(static_cast<size_t>(tq)),
        end(static_cast<size_t>(tq)),
        query_begin(static_cast<size_t>(tk)),
        query_end(static_cast<size_t>(tk)) {
    std::copy(keys.begin.begin(), keys.begin.end(), begin.p);
    std::copy(keys.end.begin(), keys.end.end(), end.p);
    std::copy(queries.begin.begin(), queries.begin.end(), query_begin.p);
    std::copy(queries.end.begin(), queries.end.end(), query_end.p);
    std::normal_distribution<float> normal;
    Random random(c.seed * 977);
    for (int h = 0; h < c.heads_q; ++h) sinks[static_cast<size_t>(h)] = normal(random);
    int64_t q0 = 0, k0 = 0;
    for (size_t n = 0; n < c.documents.size(); ++n) {  // what a document holds does not depend on the others
      normal.reset();                                  // it keeps every other number
      Random own(c.seed * 1009 + static_cast<uint64_t>(c.documents[n].q) * 31 +
                 static_cast<uint64_t>(c.documents[n].k));
      const auto fill = [&](const Tensor& x, int64_t first, int64_t rows) {
        for (int64_t t = first; t < first + rows; ++t) {
          for (int64_t h = 0; h < x.heads; ++h) {
            for (int64_t e = 0; e < x.dim; ++e) x.at(t, h)[e] = narrow<T>(normal(own));
          }
        }
      };
      fill(q, q0, c.documents[n].q), fill(dout, q0, c.documents[n].q);
      fill(k, k0, c.documents[n].k), fill(v, k0, c.documents[n].k);
      for (int64_t h = 0; h < c.heads_q; ++h) {
        for (int64_t t = q0; t < q0 + c.documents[n].q; ++t) dlse[static_cast<size_t>(h * tq + t)] = normal(own);
      }
      q0 += c.documents[n].q, k0 += c.documents[n].k;
    }
  }

  static double dot(const uint16_t* a, const uint16_t* b, int n) {
    double s = 0;
    for (int e = 0; e < n; ++e)
      s += static_cast<double>(ptx::widen<T>(a[e])) * static_cast<double>(ptx::widen<T>(b[e]));
    return s;
  }
  double scale() const { return static_cast<double>(1.f / std::sqrt(static_cast<float>(c.dim))); }

  // Sums of terms and of their sizes, [rows * heads * dim] each.
  struct Sums {
    std::vector<double> sum, size;
    explicit Sums(int64_t n) : sum(static_cast<size_t>(n)), size(static_cast<size_t>(n)) {}
    void add(int64_t at, double x) { sum[static_cast<size_t>(at)] += x, size[static_cast<size_t>(at)] += std::fabs(x); }
  };
  struct Expected {
    Sums dq, dk, dv, dsinks;
  };
  // Fills out and lse as a forward would, and returns the gradients.
  Expected reference() {
    Expected x{Sums(tq * c.heads_q * c.dim), Sums(tk * c.heads_k * c.dim), Sums(tk * c.heads_k * c.dim_v),
               Sums(c.heads_q)};
    for (int h = 0; h < c.heads_q; ++h) {
      for (int64_t i = 0; i < tq; ++i) {
        const int hk = h / (c.heads_q / c.heads_k);
        const int64_t low = keys.begin[static_cast<size_t>(i)], n = keys.end[static_cast<size_t>(i)] - low;
        const auto at = static_cast<size_t>(h * tq + i);
        std::vector<double> p(static_cast<size_t>(n)), slope(p.size(), 1.0);
        const double sink = static_cast<double>(sinks[static_cast<size_t>(h)]);
        double largest = c.sinks ? sink : -INFINITY;
        for (int64_t j = 0; j < n; ++j) {
          double s = dot(q.at(i, h), k.at(low + j, hk), c.dim) * scale();
          if (c.softcap > 0) {
            const double t = std::tanh(s / static_cast<double>(c.softcap));
            s = static_cast<double>(c.softcap) * t, slope[static_cast<size_t>(j)] = 1 - t * t;
          }
          p[static_cast<size_t>(j)] = s, largest = std::max(largest, s);
        }
        double total = c.sinks && n > 0 ? std::exp(sink - largest) : 0;
        for (double& s : p) s = std::exp(s - largest), total += s;
        for (double& s : p) s /= total;
        for (int e = 0; e < c.dim_v; ++e) {
          double o = 0;
          for (int64_t j = 0; j < n; ++j) {
            o += p[static_cast<size_t>(j)] * static_cast<double>(ptx::widen<T>(v.at(low + j, hk)[e]));
          }
          out.at(i, h)[e] = narrow<T>(o);
        }
        lse[at] = n > 0 ? static_cast<float>(largest + std::log(total)) : -INFINITY;
        if (n == 0) continue;
        const double delta = dot(out.at(i, h), dout.at(i, h), c.dim_v) - (c.dlse ? static_cast<double>(dlse[at]) : 0);
        if (c.sinks) x.dsinks.add(h, -std::exp(sink - largest) / total * delta);
        for (int64_t j = 0; j < n; ++j) {
          const int64_t key = low + j;
          const double weight = p[static_cast<size_t>(j)];
          const double ds =
              weight * (dot(dout.at(i, h), v.at(key, hk), c.dim_v) - delta) * slope[static_cast<size_t>(j)] * scale();
          for (int e = 0; e < c.dim; ++e) {
            x.dq.add((i * c.heads_q + h) * c.dim + e, ds * static_cast<double>(ptx::widen<T>(k.at(key, hk)[e])));
            x.dk.add((key * c.heads_k + hk) * c.dim + e, ds * static_cast<double>(ptx::widen<T>(q.at(i, h)[e])));
          }
          for (int e = 0; e < c.dim_v; ++e) {
            x.dv.add((key * c.heads_k + hk) * c.dim_v + e,
                     weight * static_cast<double>(ptx::widen<T>(dout.at(i, h)[e])));
          }
        }
      }
    }
    return x;
  }

  void run() {
    BackwardTask task{};
    task.total_q = tq, task.total_k = tk, task.heads_q = c.heads_q, task.heads_k = c.heads_k;
    task.head_dim = c.dim, task.head_dim_v = c.dim_v;
    task.dtype = is_f16<T> ? DType::float16 : DType::bfloat16;
    task.scale = static_cast<float>(scale()), task.softcap = c.softcap;
    task.query = q.view(), task.key = k.view(), task.value = v.view(), task.out = out.view(), task.dout = dout.view();
    task.dquery = dq.view(), task.dkey = dk.view(), task.dvalue = dv.view();
    task.key_begin = begin.p, task.key_end = end.p, task.query_begin = query_begin.p, task.query_end = query_end.p;
    task.lse = lse.p, task.dlse = c.dlse ? dlse.p : nullptr;
    task.sinks = c.sinks ? sinks.p : nullptr, task.dsinks = c.sinks ? dsinks.p : nullptr;
#ifdef BACKWARD_DRIVER_HOPPER
    const Stream stream{nullptr, Device{2 + c.small, 90, 227 * 1024}};
#else
    const Stream stream{nullptr, Device{3, c.small ? 86 : 80, (c.small ? 99 : 163) * 1024}};
#endif
    const BackwardKernel kernel = kernel_for();
    emu::Buffer<uint8_t> query_table(tile_table_bytes(tq)), key_table(tile_table_bytes(tk));
    emu::Buffer<uint8_t> scratch(kernel.scratch_bytes(task));
    task.query_tiles = tile_table_at(query_table.p, tq), task.key_tiles = tile_table_at(key_table.p, tk);
    task.scratch = scratch.p;
    build_tile_table(begin.p, end.p, tq, tk, kernel.query_rows(stream.device), task.query_tiles, stream);
    build_tile_table(query_begin.p, query_end.p, tk, tq, kernel.key_rows(stream.device), task.key_tiles, stream);
    kernel.run(task, stream);
  }

  BackwardKernel kernel_for() const {
#ifndef BACKWARD_DRIVER_ONLY  // "64, 64": one instantiation, which compiles sooner
    const int most = std::max(c.dim, c.dim_v);
    if (most > 192 || c.dim_v > 128) return Launch<T, 256, 256>::kernel();
    if (most > 128) return Launch<T, 192, 128>::kernel();
#ifndef BACKWARD_DRIVER_HOPPER
    if (most > 64 && most <= 96) return Launch<T, 96, 96>::kernel();
#endif
    if (most > 64) return Launch<T, 128, 128>::kernel();
    return Launch<T, 64, 64>::kernel();
#else
    return Launch<T, BACKWARD_DRIVER_ONLY>::kernel();
#endif
  }
};

std::vector<Case> all_cases() {
  std::vector<Case> cases = fixed_cases();
#ifdef BACKWARD_DRIVER_HOPPER
  // Blocks that all rows of a group see between blocks that they do not, and more blocks than stages.
  Case c;
  c.name = "windows of 300", c.documents = {500, 60}, c.left = 299, c.dim = c.dim_v = 128;
  cases.push_back(c);
  // A group without rows passes more blocks than there are stages while the other works on them.
  c.name = "long and short sides", c.documents = {{30, 700}, {700, 30}}, c.causal = false, c.left = -1,
  c.dim = c.dim_v = 64;
  cases.push_back(c);
#endif
  return cases;
}

// ---- checks

int64_t failures = 0, runs = 0;
double worst = 0;
uint64_t conflicts = 0;

void fail(const Case& c, const char* dtype, const std::string& what) {
  std::printf("%s %s D %d/%d: %s\n", c.name.c_str(), dtype, c.dim, c.dim_v, what.c_str());
  if (++failures < 10) return;
  std::printf("FAIL: no more is tried\n");
  std::exit(1);
}

template <class T>
void compare(const Case& c, const char* dtype, const char* name, const Tensor& got, const Ranges& ranges,
             const typename Problem<T>::Sums& want) {
  const double unit = is_f16<T> ? 0x1p-11 : 0x1p-8;
  int64_t wrong = 0, at = 0;
  for (int64_t t = 0; t < got.rows; ++t) {
    const bool empty = ranges.begin[static_cast<size_t>(t)] >= ranges.end[static_cast<size_t>(t)];
    for (int64_t h = 0; h < got.heads; ++h) {
      for (int64_t e = 0; e < got.dim; ++e, ++at) {
        const double w = want.sum[static_cast<size_t>(at)], size = want.size[static_cast<size_t>(at)];
        const double error = std::fabs(static_cast<double>(ptx::widen<T>(got.at(t, h)[e])) - w);
        const double bound = unit * (size + std::fabs(w)) + 1e-5 * (1 + size);
        if (!(error <= (empty ? 0 : bound))) ++wrong;
        if (std::isfinite(error)) worst = std::max(worst, error / bound);
      }
    }
  }
  if (wrong > 0) fail(c, dtype, std::string(name) + ": " + std::to_string(wrong) + " wrong elements");
  if (!got.gaps_untouched()) fail(c, dtype, std::string(name) + ": written outside its elements");
}

template <class T>
void run_checked(Problem<T>& problem, const char* dtype) {
  ++runs;
  try {
    problem.run();
  } catch (const std::exception& error) {
    fail(problem.c, dtype, error.what());
    emu::report().clear();
  }
  conflicts += emu::report().counters.bank_conflicts;
  emu::report().counters = {};
}

// Numbers; every document alone, on another schedule; every other document replaced by NaN.
template <class T>
void check(const Case& c, bool isolation) {
  const char* dtype = is_f16<T> ? "float16" : "bfloat16";
  Problem<T> packed(c);
  const auto want = packed.reference();
  run_checked(packed, dtype);
  compare<T>(c, dtype, "dq", packed.dq, packed.keys, want.dq);
  compare<T>(c, dtype, "dk", packed.dk, packed.queries, want.dk);
  compare<T>(c, dtype, "dv", packed.dv, packed.queries, want.dv);
  for (size_t h = 0; c.sinks && h < packed.dsinks.n; ++h) {
    const double error = std::fabs(static_cast<double>(packed.dsinks[h]) - want.dsinks.sum[h]);
    if (!(error <= 2e-5 * (want.dsinks.size[h] + 1))) fail(c, dtype, "dsinks: wrong by " + std::to_string(error));
  }
  if (!isolation || c.empty_every > 0) return;
  const int policy = emu::config().policy;
  emu::config().policy = (policy + 1) % 3;
  Problem<T> poisoned(c);
  poisoned.reference();
  int64_t q0 = 0, k0 = 0;
  for (size_t n = 0; n < c.documents.size(); ++n) {
    const Document& d = c.documents[n];
    if (n % 2 == 1 || d.padding) {
      poison<T>(poisoned.q, q0, d.q), poison<T>(poisoned.out, q0, d.q), poison<T>(poisoned.dout, q0, d.q);
      poison<T>(poisoned.k, k0, d.k), poison<T>(poisoned.v, k0, d.k);
      for (int64_t h = 0; h < c.heads_q; ++h) {
        for (int64_t t = q0; t < q0 + d.q; ++t) {
          poisoned.lse[static_cast<size_t>(h * poisoned.tq + t)] = NAN;
          poisoned.dlse[static_cast<size_t>(h * poisoned.tq + t)] = NAN;
        }
      }
    }
    q0 += d.q, k0 += d.k;
  }
  run_checked(poisoned, dtype);
  q0 = k0 = 0;
  for (size_t n = 0; n < c.documents.size(); ++n) {
    const Document& d = c.documents[n];
    if (n % 2 == 0 || d.padding) {  // rows of padding get 0 whatever they hold
      if (!same_rows(packed.dq, q0, poisoned.dq, q0, d.q) || !same_rows(packed.dk, k0, poisoned.dk, k0, d.k) ||
          !same_rows(packed.dv, k0, poisoned.dv, k0, d.k)) {
        fail(c, dtype, "document " + std::to_string(n) + " changes with what another one holds");
      }
    }
    if (!d.padding) {
      Case one = c;
      one.documents = {d};
      Problem<T> alone(one);
      alone.reference();
      run_checked(alone, dtype);
      if (!same_rows(packed.dq, q0, alone.dq, 0, d.q) || !same_rows(packed.dk, k0, alone.dk, 0, d.k) ||
          !same_rows(packed.dv, k0, alone.dv, 0, d.k)) {
        fail(c, dtype, "document " + std::to_string(n) + " has other bits alone");
      }
    }
    q0 += d.q, k0 += d.k;
  }
  emu::config().policy = policy;
}

// Any int32 values as ranges: nothing may be touched outside the buffers.
template <class T>
void check_garbage(const Case& c, Random& random) {
  Problem<T> problem(c);
  problem.reference();
  using Limits = std::numeric_limits<int32_t>;
  const auto hostile = [&] {
    const int32_t values[] = {Limits::min(),
                              Limits::max(),
                              Limits::min() + 1,
                              Limits::max() - 1,
                              -1,
                              0,
                              static_cast<int32_t>(random()),
                              static_cast<int32_t>(below(random, 300))};
    return values[below(random, 8)];
  };
  const bool all = below(random, 2) == 0;
  for (emu::Buffer<int32_t>* x : {&problem.begin, &problem.end, &problem.query_begin, &problem.query_end}) {
    for (size_t i = 0; i < x->n; ++i) {
      if (all || below(random, 5) == 0) (*x)[i] = hostile();
    }
  }
  run_checked(problem, is_f16<T> ? "float16 garbage" : "bfloat16 garbage");
  if (!problem.dq.gaps_untouched() || !problem.dk.gaps_untouched() || !problem.dv.gaps_untouched()) {
    fail(c, "garbage", "written outside the elements");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  Random random(argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 1);
  const std::string only = argc > 3 ? argv[3] : "";
#ifdef BACKWARD_DRIVER_ONLY
  const int limits[] = {BACKWARD_DRIVER_ONLY};
  const auto serves = [&](const Case& c) { return c.dim <= limits[0] && c.dim_v <= limits[1]; };
#else
  const auto serves = [](const Case&) { return true; };
#endif
  int number = 0;
  for (const Case& c : all_cases()) {
    if ((!only.empty() && c.name != only) || !serves(c)) continue;
    if (++number % 2 == 0) {
      check<f16_t>(c, true);
    } else {
      check<bf16_t>(c, true);
    }
  }
  for (int i = 0; i < rounds; ++i) {
    const Case c = random_case(random);
    if (!serves(c)) continue;
    if (i % 6 == 5) {
      i % 4 < 2 ? check_garbage<bf16_t>(c, random) : check_garbage<f16_t>(c, random);
    } else if (i % 2 == 0) {
      check<bf16_t>(c, i % 4 == 0);
    } else {
      check<f16_t>(c, i % 4 == 1);
    }
  }
  if (conflicts > 0) std::printf("%llu bank conflicts of ldmatrix\n", static_cast<unsigned long long>(conflicts));
  std::printf("%s: %lld runs, %lld failures, largest error %.2f of its bound\n",
              failures || conflicts ? "FAIL" : "PASS", static_cast<long long>(runs), static_cast<long long>(failures),
              worst);
  return failures > 0 || conflicts > 0;
}
