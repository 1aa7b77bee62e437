// The tensor-core forward on the emulator, against sums in double: numbers, bits of a document alone and packed, NaN of
// one document in another, schedules, and memory under any metadata.
//
//   forward_driver (hopper_driver for sm_90a) [rounds of random cases] [seed] [name of the one case to run]
//   exit status 1 for a wrong number, a bit that differs, or any report of the emulator
//
// An element of out passes if |error| <= u (sum of |terms| + |wanted|) + 1e-5 (1 + sum of |terms|), u the rounding unit
// of the dtype: weights are rounded once before they are multiplied, results once in the end. lse is float32.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "attention_cases.h"
#ifdef FORWARD_DRIVER_HOPPER  // hopper_driver.cpp
#include "hopper_forward_launch.cuh"
#else
#include "attention_forward_launch.cuh"
#endif
#include "tile_table.cu"

namespace {

using namespace packattn::cases;
using packattn::DType;

#ifdef FORWARD_DRIVER_HOPPER
template <class T, int D, int DV>
using Launch = HopperForwardLaunch<T, D, DV>;
#else
template <class T, int D, int DV>
using Launch = ForwardLaunch<T, D, DV>;
#endif

template <class T>
struct Problem {
  const Case& c;
  Ranges ranges;
  int64_t tq, tk;
  Tensor q, k, v, out;
  emu::Buffer<float> lse, sinks;
  emu::Buffer<int32_t> begin, end;

  explicit Problem(const Case& one)
      : c(one),
        ranges(key_ranges(one)),
        tq(static_cast<int64_t>(ranges.begin.size())),
        tk(ranges.keys),
        q(tq, c.heads_q, c.dim, c.layout),
        k(tk, c.heads_k, c.dim, c.layout),
        v(tk, c.heads_k, c.dim_v, c.layout),
        out(tq, c.heads_q, c.dim_v, c.layout % 3),
        lse(static_cast<size_t>(c.heads_q * tq)),
        sinks(static_cast<size_t>(c.heads_q)),
        begin(static_cast<size_t>(tq)),
        end(static_cast<size_t>(tq)) {
    std::copy(ranges.begin.begin(), ranges.begin.end(), begin.p);
    std::copy(ranges.end.begin(), ranges.end.end(), end.p);
    std::normal_distribution<float> normal;
    Random random(c.seed * 977);
    for (int h = 0; h < c.heads_q; ++h) sinks[static_cast<size_t>(h)] = c.steep * normal(random);
    int64_t q0 = 0, k0 = 0;
    for (const Document& d : c.documents) {        // what a document holds does not depend on the others
      std::normal_distribution<float> own_normal;  // has a memory of its own
      Random own(c.seed * 1009 + static_cast<uint64_t>(d.q) * 31 + static_cast<uint64_t>(d.k));
      const auto fill = [&](const Tensor& x, int64_t first, int64_t rows, float size) {
        for (int64_t t = first; t < first + rows; ++t) {
          for (int64_t h = 0; h < x.heads; ++h) {
            for (int64_t e = 0; e < x.dim; ++e) x.at(t, h)[e] = ptx::narrow<T>(size * own_normal(own));
          }
        }
      };
      fill(q, q0, d.q, c.steep), fill(k, k0, d.k, 1.f), fill(v, k0, d.k, 1.f);
      q0 += d.q, k0 += d.k;
    }
  }

  double scale() const { return static_cast<double>(1.f / std::sqrt(static_cast<float>(c.dim))); }

  void run() {
    ForwardTask task{};
    task.total_q = tq, task.total_k = tk, task.heads_q = c.heads_q, task.heads_k = c.heads_k;
    task.head_dim = c.dim, task.head_dim_v = c.dim_v;
    task.dtype = is_f16<T> ? DType::float16 : DType::bfloat16;
    task.scale = static_cast<float>(scale()), task.softcap = c.softcap;
    task.query = q.view(), task.key = k.view(), task.value = v.view(), task.out = out.view();
    task.key_begin = begin.p, task.key_end = end.p, task.lse = lse.p, task.sinks = c.sinks ? sinks.p : nullptr;
#ifdef FORWARD_DRIVER_HOPPER
    const Stream stream{nullptr, Device{2 + c.small, 90, 227 * 1024}};
#else
    const Stream stream{nullptr, Device{3, c.small ? 86 : 80, (c.small ? 99 : 163) * 1024}};
#endif
    const ForwardKernel kernel = kernel_for();
    const int rows = kernel.tile_rows(stream.device);
    emu::Buffer<uint8_t> table(tile_table_bytes(tq)), few_table(tile_table_bytes(tq, false));
    task.tiles = tile_table_at(table.p, tq);
    if (kernel.few_tile_rows == nullptr) {
      build_tile_table(begin.p, end.p, tq, tk, rows, task.tiles, stream);
    } else {
      task.few_tiles = tile_table_at(few_table.p, tq, false);
      build_tile_tables(begin.p, end.p, tq, tk, rows, task.tiles, kernel.few_tile_rows(task), task.few_tiles, stream);
    }
    kernel.run(task, stream);
  }

  ForwardKernel kernel_for() const {
#ifndef FORWARD_DRIVER_ONLY  // "64, 64": one instantiation, which compiles sooner
    const int most = std::max(c.dim, c.dim_v);
    if (most > 192 || c.dim_v > 128) return Launch<T, 256, 256>::kernel();
    if (most > 128) return Launch<T, 192, 128>::kernel();
#ifndef FORWARD_DRIVER_HOPPER
    if (most > 64 && most <= 96) return Launch<T, 96, 96>::kernel();
#endif
    if (most > 64) return Launch<T, 128, 128>::kernel();
    return Launch<T, 64, 64>::kernel();
#else
    return Launch<T, FORWARD_DRIVER_ONLY>::kernel();
#endif
  }
};

// ---- checks

int64_t failures = 0, runs = 0;
double worst = 0, worst_lse = 0;
uint64_t conflicts = 0;

void fail(const Case& c, const char* dtype, const std::string& what) {
  if (++failures <= 20) std::printf("%s %s D %d/%d: %s\n", c.name.c_str(), dtype, c.dim, c.dim_v, what.c_str());
}

template <class T>
double number(uint16_t x) {
  return static_cast<double>(ptx::widen<T>(x));
}

// Holds one row of one head against its sums in double.
template <class T>
bool right(const Problem<T>& p, int h, int64_t i) {
  const Case& c = p.c;
  const double unit = is_f16<T> ? 0x1p-11 : 0x1p-8;
  const int hk = h / (c.heads_q / c.heads_k);
  const int64_t low = p.ranges.begin[static_cast<size_t>(i)], n = p.ranges.end[static_cast<size_t>(i)] - low;
  const double got_lse = static_cast<double>(p.lse[static_cast<size_t>(h * p.tq + i)]);
  if (n <= 0) {
    const uint16_t* row = p.out.at(i, h);
    return got_lse == -INFINITY && std::all_of(row, row + c.dim_v, [](uint16_t x) { return x == 0; });
  }
  std::vector<double> weights(static_cast<size_t>(n));
  const double sink = static_cast<double>(p.sinks[static_cast<size_t>(h)]), cap = static_cast<double>(c.softcap);
  double largest = c.sinks ? sink : -INFINITY;
  for (int64_t j = 0; j < n; ++j) {
    double s = 0;
    for (int e = 0; e < c.dim; ++e) s += number<T>(p.q.at(i, h)[e]) * number<T>(p.k.at(low + j, hk)[e]);
    s *= p.scale();
    if (cap > 0) s = cap * std::tanh(s / cap);
    weights[static_cast<size_t>(j)] = s;
    largest = std::max(largest, s);
  }
  double total = c.sinks ? std::exp(sink - largest) : 0;
  for (double& w : weights) total += w = std::exp(w - largest);
  bool good = true;
  for (int e = 0; e < c.dim_v; ++e) {
    double want = 0, size = 0;
    for (int64_t j = 0; j < n; ++j) {
      const double term = weights[static_cast<size_t>(j)] / total * number<T>(p.v.at(low + j, hk)[e]);
      want += term, size += std::fabs(term);
    }
    const double error = std::fabs(number<T>(p.out.at(i, h)[e]) - want);
    const double bound = unit * (size + std::fabs(want)) + 1e-5 * (1 + size);
    good = good && error <= bound;
    if (std::isfinite(error)) worst = std::max(worst, error / bound);
  }
  const double want_lse = largest + std::log(total), error = std::fabs(got_lse - want_lse);
  const double bound = 5e-6 * (1 + std::fabs(want_lse) + cap);
  if (std::isfinite(error)) worst_lse = std::max(worst_lse, error / bound);
  return good && error <= bound;
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
  if (!problem.out.gaps_untouched()) fail(problem.c, dtype, "written outside the elements of out");
}

template <class T>
bool same_document(const Problem<T>& a, int64_t row_a, const Problem<T>& b, int64_t row_b, int64_t rows) {
  for (int h = 0; h < a.c.heads_q; ++h) {
    const float *x = a.lse.p + h * a.tq + row_a, *y = b.lse.p + h * b.tq + row_b;
    if (std::memcmp(x, y, static_cast<size_t>(rows) * sizeof(float)) != 0) return false;
  }
  return same_rows(a.out, row_a, b.out, row_b, rows);
}

// Numbers; every document alone, on another schedule; every other document replaced by NaN, on the third.
template <class T>
void check(const Case& c, bool isolation) {
  const char* dtype = is_f16<T> ? "float16" : "bfloat16";
  Problem<T> packed(c);
  run_checked(packed, dtype);
  int64_t wrong = 0;
  for (int h = 0; h < c.heads_q; ++h) {
    for (int64_t i = 0; i < packed.tq; ++i) wrong += !right(packed, h, i);
  }
  if (wrong > 0) fail(c, dtype, std::to_string(wrong) + " wrong rows");
  if (!isolation || c.empty_every > 0 || c.layout > 2) return;
  const int policy = emu::config().policy;
  emu::config().policy = (policy + 1) % 3;
  Problem<T> poisoned(c);
  int64_t q0 = 0, k0 = 0;
  for (size_t n = 0; n < c.documents.size(); ++n) {
    const Document& d = c.documents[n];
    if (n % 2 == 1 || d.padding) {
      poison<T>(poisoned.q, q0, d.q), poison<T>(poisoned.k, k0, d.k), poison<T>(poisoned.v, k0, d.k);
    }
    q0 += d.q, k0 += d.k;
  }
  run_checked(poisoned, dtype);
  emu::config().policy = (policy + 2) % 3;
  q0 = 0;
  for (size_t n = 0; n < c.documents.size(); ++n) {
    const Document& d = c.documents[n];
    // Rows of padding get 0 whatever they hold.
    if ((n % 2 == 0 || d.padding) && !same_document(packed, q0, poisoned, q0, d.q)) {
      fail(c, dtype, "document " + std::to_string(n) + " changes with what another one holds");
    }
    if (!d.padding) {
      Case one = c;
      one.documents = {d};
      Problem<T> alone(one);
      run_checked(alone, dtype);
      if (!same_document(packed, q0, alone, 0, d.q)) {
        fail(c, dtype, "document " + std::to_string(n) + " has other bits alone");
      }
    }
    q0 += d.q;
  }
  emu::config().policy = policy;
}

// Any int32 values as ranges: nothing may be touched outside the buffers, and every element is written.
template <class T>
void check_garbage(const Case& c, Random& random) {
  Problem<T> problem(c);
  using Limits = std::numeric_limits<int32_t>;
  const auto hostile = [&] {
    const int32_t values[] = {Limits::min(),
                              Limits::max(),
                              Limits::min() + 1,
                              Limits::max() - 1,
                              -1,
                              static_cast<int32_t>(problem.tk),
                              static_cast<int32_t>(random()),
                              static_cast<int32_t>(below(random, 300))};
    return values[below(random, 8)];
  };
  const bool all = below(random, 2) == 0;
  for (emu::Buffer<int32_t>* x : {&problem.begin, &problem.end}) {
    for (size_t i = 0; i < x->n; ++i) {
      if (all || below(random, 5) == 0) (*x)[i] = hostile();
    }
  }
  // What the ranges then mean, which the kernel has to follow.
  for (size_t i = 0; i < problem.begin.n; ++i) {
    problem.ranges.begin[i] = std::clamp(problem.begin[i], 0, static_cast<int32_t>(problem.tk));
    problem.ranges.end[i] = std::clamp(problem.end[i], problem.ranges.begin[i], static_cast<int32_t>(problem.tk));
  }
  const char* dtype = is_f16<T> ? "float16 garbage" : "bfloat16 garbage";
  run_checked(problem, dtype);
  int64_t wrong = 0;
  for (int h = 0; h < c.heads_q; ++h) {
    for (int64_t i = 0; i < problem.tq; ++i) wrong += !right(problem, h, i);
  }
  if (wrong > 0) fail(c, dtype, std::to_string(wrong) + " wrong rows");
}

// What the shared cases leave out.
std::vector<Case> more_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::vector<Document> documents, int dim, int dim_v) -> Case& {
    Case c;
    c.name = name, c.documents = std::move(documents), c.seed = 100 + cases.size();
    c.dim = dim, c.dim_v = dim_v;
    cases.push_back(c);
    return cases.back();
  };
  add("steep", {400, 60}, 64, 64).steep = 12.f;
  add("steep 128", {260}, 128, 128).steep = 12.f;
  {
    Case& c = add("steep 256 with sinks", {150, 100}, 256, 256);
    c.steep = 12.f, c.sinks = true, c.causal = false;
  }
  add("one head for all", {90, 40}, 64, 64).layout = 3;
  add("one row for all", {90, 40}, 96, 96).layout = 4;
  {
    Case& c = add("one head for eight", {130, 34, 34}, 128, 128);
    c.heads_q = 8, c.layout = 2;
  }
  add("narrow windows", {300}, 96, 80).left = 3;
  // Rows that begin to see at the last key of a block, and one key after the first of a block that others see whole.
  add("windows of two", {300}, 64, 64).left = 1;
  add("windows of 95", {300}, 64, 64).left = 94;
  {
    std::vector<Document> documents;
    for (int n = 1; n <= 20; ++n) documents.emplace_back(n);
    Case& c = add("more rounds than one, scores below 2^-126", documents, 64, 64);
    c.heads_q = 3, c.steep = 60.f;
  }
#ifdef FORWARD_DRIVER_HOPPER
  // Blocks that all rows of a group see between blocks that they do not, and more blocks than stages.
  add("windows of 300", {700, 70}, 128, 128).left = 299;
  {  // A maximum that stays for many blocks: what came before is to be scaled by 1, whatever a compiler contracts.
    Case& c = add("one maximum for many blocks", {{1, 100000}}, 64, 64);
    c.heads_q = 2, c.heads_k = 1, c.steep = 6.f;
  }
  const auto heads = [](Case& c, int group, int heads_k) { c.heads_q = group * heads_k, c.heads_k = heads_k; };
  // Documents of few rows beside long ones: tiles of 64, 16, 32, 4 rows, with as many heads as make 64.
  heads(add("few rows, a head each", {1, 130, 64, 2, 65, 63, 33, 31, 16, 17, 70, 5}, 64, 64), 1, 3);
  heads(add("few rows, three heads", {64, 7, 200, 65, 1}, 128, 128), 3, 2);
  {
    Case& c = add("few rows, four heads", {3, 16, 17, 64, 65, 1, 15, 40, 150, 33, -20, 8}, 128, 128);
    heads(c, 4, 2), c.sinks = true, c.layout = 2;
  }
  {
    Case& c = add("few rows, six heads, both ways", {34, 129, 1, 64, 20}, 64, 64);
    heads(c, 6, 2), c.causal = false, c.layout = 1, c.softcap = 3.f;
  }
  {
    Case& c = add("few rows, sixteen heads", {5, 1, 64, 70, 3, 4, 9}, 64, 64);
    heads(c, 16, 1), c.sinks = true;
  }
  heads(add("few rows, 32 heads", {5, 1, 70, 20}, 64, 64), 32, 1);
  // Documents between padding, whose rows past the first 64 go to the large tiles.
  heads(add("few rows between padding", {-70, 10, -300, 64, -1, 66, -64, 20}, 64, 64), 4, 1);
  // As in decoding: a row or a few, many keys; blocks that all rows see, and a last one that ends anywhere.
  heads(add("few rows, many keys", {{1, 300}, {1, 64}, {4, 257}, {1, 0}, {2, 1}, {17, 200}, {70, 100}}, 128, 128), 8,
        1);
  heads(add("few rows, many keys, 192 and 128", {{1, 200}, {20, 129}, {1, 65}}, 192, 128), 4, 1);
  {
    Case& c = add("few rows, many keys, 256", {{1, 200}, {20, 129}, {33, 33}, {1, 65}, {90, 95}}, 256, 200);
    heads(c, 4, 1), c.sinks = true;
  }
  {
    Case& c = add("few rows, windows of 100", {{60, 500}, {1, 90}, {64, 64}}, 128, 128);
    heads(c, 2, 1), c.left = 99;
  }
#endif
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  Random random(argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 1);
  const std::string only = argc > 3 ? argv[3] : "";
#ifdef FORWARD_DRIVER_ONLY
  const int limits[] = {FORWARD_DRIVER_ONLY};
  const auto holds = [&](const Case& c) { return c.dim <= limits[0] && c.dim_v <= limits[1]; };
#else
  const auto holds = [](const Case&) { return true; };
#endif
#ifdef FORWARD_DRIVER_HOPPER  // no tensor map of expanded tensors
  const auto serves = [&](const Case& c) { return holds(c) && c.layout <= 2; };
#else
  const auto serves = holds;
#endif
  std::vector<Case> cases = fixed_cases();
  for (const Case& c : more_cases()) cases.push_back(c);
  int number = 0;
  for (const Case& c : cases) {
    if ((!only.empty() && c.name != only) || !serves(c)) continue;
    ++number % 2 == 0 ? check<f16_t>(c, true) : check<bf16_t>(c, true);
  }
  for (int i = 0; i < rounds; ++i) {
    const Case c = random_case(random);
    if (!serves(c)) continue;
    if (i % 6 == 5) {
      i % 4 < 2 ? check_garbage<bf16_t>(c, random) : check_garbage<f16_t>(c, random);
    } else {
      i % 2 == 0 ? check<bf16_t>(c, i % 4 == 0) : check<f16_t>(c, i % 4 == 1);
    }
  }
  if (conflicts > 0) std::printf("%llu bank conflicts of ldmatrix\n", static_cast<unsigned long long>(conflicts));
  std::printf("%s: %lld runs, %lld failures, largest error of out %.2f and of lse %.2f of its bound\n",
              failures || conflicts ? "FAIL" : "PASS", static_cast<long long>(runs), static_cast<long long>(failures),
              worst, worst_lse);
  return failures > 0 || conflicts > 0;
}
