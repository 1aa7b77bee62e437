// What the drivers of the attention kernels share: packings and masks to run, fixed ones and random ones, and tensors
// in several layouts.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../../csrc/common/params.h"
#include "ptx.cuh"

namespace packattn::cases {

using namespace packattn::cuda;
namespace emu = packattn::emu;

using Random = std::mt19937_64;
inline int64_t below(Random& random, int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }

// ---- cases

struct Document {
  int q;
  int k;
  bool padding = false;  // of no document: rows that see nothing, keys that nobody sees
  Document(int rows) : q(std::abs(rows)), k(std::abs(rows)), padding(rows < 0) {}
  Document(int rows, int keys) : q(rows), k(keys) {}
};

struct Case {
  std::string name;
  std::vector<Document> documents;
  bool causal = true;
  int left = -1, right = -1, prefix = 0, chunk = 0, empty_every = 0;
  int heads_q = 2, heads_k = 1, dim = 64, dim_v = 64;
  float softcap = 0.f;
  bool sinks = false, dlse = true;
  int layout = 0;      // 0: contiguous; 1: [heads, tokens, dim]; 2: gaps between rows and heads; 3, 4: see Tensor
  bool small = false;  // a device with 99 KB of shared memory
  float steep = 1.f;   // the forward's queries are as much larger: maxima that grow along a row
  uint64_t seed = 1;
};

struct Ranges {
  std::vector<int32_t> begin, end;  // per row
  int64_t keys = 0;
};

inline Ranges key_ranges(const Case& c) {
  Ranges r;
  int q0 = 0, k0 = 0;
  for (const Document& d : c.documents) {
    for (int i = 0; i < d.q; ++i) {
      const int diagonal = k0 + d.k - (d.q - i), row = q0 + i;
      int low = k0, high = k0 + d.k;
      if (c.left >= 0) low = std::max(low, diagonal - c.left);
      if (c.chunk > 0) low = std::max(low, k0 + std::max(diagonal - k0, 0) / c.chunk * c.chunk);
      if (c.causal) high = std::min(high, std::max(diagonal + 1, std::min(k0 + c.prefix, high)));
      if (!c.causal && c.right >= 0) high = std::min(high, diagonal + c.right + 1);
      if (d.padding || (c.empty_every > 0 && row % c.empty_every == 0)) low = high = k0;
      r.begin.push_back(std::min(low, k0 + d.k));
      r.end.push_back(std::max(high, r.begin.back()));
    }
    q0 += d.q;
    k0 += d.k;
  }
  r.keys = k0;
  return r;
}

// ---- tensors

template <class T>
uint16_t narrow(double x) {
  return ptx::narrow<T>(static_cast<float>(x));
}

// [rows, heads, dim] in some layout; what lies between rows stays 0xFFFF. Layout 3: one head expanded to all, 4: one
// row expanded to all.
struct Tensor {
  int64_t rows, heads, dim, row_stride, head_stride;
  emu::Buffer<uint16_t> data;
  Tensor(int64_t r, int64_t h, int64_t d, int layout)
      : rows(r),
        heads(h),
        dim(d),
        row_stride(layout == 0   ? h * d
                   : layout == 2 ? h * (d + 8) + 16
                   : layout == 4 ? 0
                                 : d),
        head_stride(layout == 1   ? r * d
                    : layout == 2 ? d + 8
                    : layout == 3 ? 0
                                  : d),
        data(static_cast<size_t>(layout == 2   ? r * row_stride
                                 : layout == 3 ? r * d
                                 : layout == 4 ? h * d
                                               : r * h * d)) {}
  uint16_t* at(int64_t t, int64_t h) const { return data.p + t * row_stride + h * head_stride; }
  TensorView view() const { return {data.p, row_stride, head_stride}; }
  bool gaps_untouched() const {
    std::vector<bool> inside(data.n, false);
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t e = 0; e < dim; ++e) inside[static_cast<size_t>(at(t, h) - data.p + e)] = true;
      }
    }
    for (size_t i = 0; i < data.n; ++i) {
      if (!inside[i] && data[i] != 0xFFFF) return false;
    }
    return true;
  }
};

// Fills rows [first, first + rows) with NaN, infinity and NaN of the other sign.
template <class T>
void poison(const Tensor& x, int64_t first, int64_t rows) {
  const uint16_t not_finite[] = {0x7FFF, static_cast<uint16_t>(is_f16<T> ? 0x7C00 : 0x7F80), 0xFFFF};
  for (int64_t t = first; t < first + rows; ++t) {
    for (int64_t h = 0; h < x.heads; ++h) {
      for (int64_t e = 0; e < x.dim; ++e) x.at(t, h)[e] = not_finite[(t + e) % 3];
    }
  }
}

inline bool same_rows(const Tensor& a, int64_t first_a, const Tensor& b, int64_t first_b, int64_t rows) {
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t h = 0; h < a.heads; ++h) {
      if (!std::equal(a.at(first_a + t, h), a.at(first_a + t, h) + a.dim, b.at(first_b + t, h))) return false;
    }
  }
  return true;
}

inline std::vector<Case> fixed_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::vector<Document> documents) -> Case& {
    Case c;
    c.name = name, c.documents = std::move(documents), c.seed = cases.size() + 1;
    cases.push_back(c);
    return cases.back();
  };
  const auto dims = [](Case& c, int dim, int dim_v) { c.dim = dim, c.dim_v = dim_v; };
  add("64", {64});
  add("1,1,1", {1, 1, 1}).layout = 2;
  add("100,28,1,71", {100, 28, 1, 71}).dlse = false;
  dims(add("300", {300}), 128, 128);
  add("300 window 50", {300}).left = 49;
  add("31,200 bidirectional", {31, 200}).causal = false;
  add("15,1,47,130 bidirectional", {15, 1, 47, 130}).causal = false;
  add("255,60 bidirectional", {255, 60}).causal = false;
  {
    Case& c = add("windows both ways", {90, 37});
    c.causal = false, c.left = 20, c.right = 9, c.layout = 1;
    dims(c, 96, 96);
  }
  {
    Case& c = add("prefix and padding", {-3, 80, -5, 41, 66, -70});
    c.prefix = 30, c.sinks = true;
    dims(c, 80, 40);
  }
  {
    Case& c = add("chunks", {150, 20});
    c.chunk = 33, c.heads_q = 8, c.heads_k = 1;
    dims(c, 8, 8);
  }
  {
    Case& c = add("keys packed differently", {{5, 3}, {90, 140}, {20, 0}, {0, 7}, {77, 20}});
    c.sinks = true, c.heads_q = 4, c.heads_k = 2;
    dims(c, 128, 128);
  }
  {
    Case& c = add("keys packed differently, bidirectional", {{5, 3}, {140, 90}, {0, 4}, {20, 77}});
    c.causal = false, c.softcap = 5.f, c.layout = 2;
    dims(c, 40, 40);
  }
  {
    Case& c = add("softcap and sinks", {70, 130});
    c.softcap = 2.f, c.sinks = true, c.heads_q = 6, c.heads_k = 2;
    dims(c, 128, 128);
  }
  {
    Case& c = add("192 and 128", {45, 130, 1});
    c.sinks = true;
    dims(c, 192, 128);
  }
  {
    Case& c = add("160 and 64", {33, 98});
    c.causal = false, c.softcap = 3.f;
    dims(c, 160, 64);
  }
  dims(add("256", {66, 100}), 256, 256);
  {
    Case& c = add("200 and 232, bidirectional", {15, 1, 47, 70});
    c.causal = false, c.layout = 2, c.softcap = 4.f;
    dims(c, 200, 232);
  }
  dims(add("64 and 128", {100, 31}), 64, 128);
  add("every third row empty", {70, 20}).empty_every = 3;
  add("every row empty", {70, 21}).empty_every = 1;
  add("padding alone", {-70, -1}).sinks = true;
  add("no keys", {{30, 0}}).sinks = true;
  add("no rows", {{0, 30}});
  // What a warp sees whole ends (begins) one short of a slice of 16.
  add("keys ahead by 14", {{100, 114}});
  {
    Case& c = add("300 window 47", {300});
    c.left = 46, c.sinks = true;
  }
  {
    Case& c = add("34 each", std::vector<Document>(9, 34));
    dims(c, 128, 128);
  }
  for (size_t i = 0, n = cases.size(); i < n; ++i) {  // 99 KB parts have tiles of their own from 128 on
    if (std::max(cases[i].dim, cases[i].dim_v) <= 96) continue;
    cases.push_back(cases[i]);
    cases.back().small = true, cases.back().name += " (99 KB)";
  }
  return cases;
}

inline Case random_case(Random& random) {
  static const int lengths[] = {1, 2, 3, 17, 31, 62, 63, 64, 65, 66, 100, 127, 128, 129, 193};
  static const int sizes[][2] = {{64, 64},   {64, 64},   {128, 128}, {96, 96},
                                 {192, 128}, {256, 256}, {48, 24},   {120, 112}};
  Case c;
  c.seed = random();
  c.name = "random " + std::to_string(c.seed);
  for (int64_t left = 1 + below(random, 280); left > 0; left -= c.documents.back().q + 1) {
    const int rows = static_cast<int>(std::min(left, static_cast<int64_t>(lengths[below(random, 15)])));
    if (below(random, 7) == 0) {
      c.documents.push_back(Document(-rows));
    } else if (below(random, 5) == 0) {
      c.documents.push_back({rows, lengths[below(random, 15)]});
    } else {
      c.documents.push_back(rows);
    }
  }
  c.causal = below(random, 3) != 0;
  if (below(random, 3) == 0) c.left = static_cast<int>(below(random, 90));
  if (below(random, 3) == 0) c.right = static_cast<int>(below(random, 90));
  if (below(random, 4) == 0) c.prefix = static_cast<int>(below(random, 60));
  if (below(random, 6) == 0) c.chunk = 1 + static_cast<int>(below(random, 70));
  if (below(random, 6) == 0) c.empty_every = 2 + static_cast<int>(below(random, 5));
  c.heads_k = 1 + static_cast<int>(below(random, 2));
  c.heads_q = c.heads_k * (1 + static_cast<int>(below(random, 3)));
  const int64_t size = below(random, 8);
  c.dim = sizes[size][0], c.dim_v = sizes[size][1];
  if (below(random, 4) == 0) c.softcap = 1.f + static_cast<float>(below(random, 9));
  c.sinks = below(random, 2) == 0, c.dlse = below(random, 2) == 0, c.small = below(random, 3) == 0;
  c.layout = static_cast<int>(below(random, 3));
  if (below(random, 3) == 0) c.steep = 12.f;
  return c;
}

}  // namespace packattn::cases
