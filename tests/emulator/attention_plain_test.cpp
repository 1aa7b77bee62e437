// The plain attention kernels on the emulator: against float64 (no more than twice the error of the same loops in
// float32), a document alone against the same document packed (equal bits), NaN that may not spread, garbage metadata.
//
//   attention_plain_test [rounds] [seed]     exit status 1 for a wrong number or any report of the emulator
#include "../../csrc/cuda/attention_plain.cu"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../csrc/cuda/metadata.cu"
#include "../../csrc/cuda/tile_table.cu"

namespace {

using namespace packattn;
using namespace packattn::cuda;
using plain::Stored;

const Stream kStream{nullptr, Device{3, 75, 64 * 1024}};
std::mt19937_64 generator(1);
int64_t below(int64_t n) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(n)); }
float normal() { return std::normal_distribution<float>()(generator); }

std::string now_running;
[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", now_running.c_str(), what.c_str());
  std::exit(1);
}

template <class T>
float decoded(Stored<T> x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return ptx::widen<T>(x);
  }
}
template <class T>
Stored<T> encoded(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return ptx::narrow<T>(x);
  }
}

enum class Layout { contiguous, transposed, sliced, odd };

template <class T>
struct Tensor {
  int64_t rows, row_stride, head_stride, offset;
  int heads, dim;
  emu::Buffer<Stored<T>> data;  // not an element more than the strides reach

  Tensor(int64_t rows_, int heads_, int dim_, Layout layout)
      : rows(rows_),
        row_stride(layout == Layout::transposed ? dim_ : heads_ * dim_ + (layout == Layout::contiguous ? 0 : 12)),
        head_stride(layout == Layout::transposed ? rows_ * dim_ : dim_),
        offset(layout == Layout::odd ? 1 : 0),
        heads(heads_),
        dim(dim_),
        data(static_cast<size_t>(rows == 0 ? 0 : offset + (rows - 1) * row_stride + (heads - 1) * head_stride + dim)) {}
  Stored<T>& at(int64_t t, int h, int d) {
    return data[static_cast<size_t>(offset + t * row_stride + h * head_stride + d)];
  }
  float get(int64_t t, int h, int d) { return decoded<T>(at(t, h, d)); }
  void set(int64_t t, int h, int d, float v) { at(t, h, d) = encoded<T>(v); }
  TensorView view() { return {data.p + offset, row_stride, head_stride}; }
};

struct Shape {
  std::vector<int32_t> begin, end;  // of each row
  int64_t total_k = 0;
  int heads_q = 2, heads_k = 1, head_dim = 16, head_dim_v = 16;
  float scale = 0.25f, softcap = 0.f;
  bool sinks = false, dlse = false;
  Layout layout = Layout::contiguous;
  int64_t rows() const { return static_cast<int64_t>(begin.size()); }
};

template <class T>
struct Call {
  Shape shape;
  Tensor<T> q, k, v, out, dout, dq, dk, dv;
  emu::Buffer<int32_t> begin, end;
  emu::Buffer<float> lse, dlse, sinks, dsinks;

  explicit Call(const Shape& s)
      : shape(s),
        q(s.rows(), s.heads_q, s.head_dim, s.layout),
        k(s.total_k, s.heads_k, s.head_dim, s.layout),
        v(s.total_k, s.heads_k, s.head_dim_v, s.layout),
        out(s.rows(), s.heads_q, s.head_dim_v, s.layout),
        dout(s.rows(), s.heads_q, s.head_dim_v, s.layout),
        dq(s.rows(), s.heads_q, s.head_dim, s.layout),
        dk(s.total_k, s.heads_k, s.head_dim, s.layout),
        dv(s.total_k, s.heads_k, s.head_dim_v, s.layout),
        begin(s.begin.size()),
        end(s.end.size()),
        lse(static_cast<size_t>(s.heads_q * s.rows())),
        dlse(static_cast<size_t>(s.heads_q * s.rows())),
        sinks(static_cast<size_t>(s.heads_q)),
        dsinks(static_cast<size_t>(s.heads_q)) {
    std::copy(s.begin.begin(), s.begin.end(), begin.p);
    std::copy(s.end.begin(), s.end.end(), end.p);
    for (Tensor<T>* x : {&q, &k, &v, &dout}) {
      for (size_t i = 0; i < x->data.n; ++i) x->data[i] = encoded<T>(normal());
    }
    for (size_t i = 0; i < dlse.n; ++i) dlse[i] = normal();
    for (size_t i = 0; i < sinks.n; ++i) sinks[i] = normal();
  }
  AttentionBackwardParams params() {
    AttentionBackwardParams p;
    p.total_q = shape.rows(), p.total_k = shape.total_k;
    p.heads_q = shape.heads_q, p.heads_k = shape.heads_k;
    p.head_dim = shape.head_dim, p.head_dim_v = shape.head_dim_v;
    p.dtype = std::is_same_v<T, float> ? DType::float32 : is_f16<T> ? DType::float16 : DType::bfloat16;
    p.scale = shape.scale, p.softcap = shape.softcap;
    p.query = q.view(), p.key = k.view(), p.value = v.view(), p.out = out.view(), p.dout = dout.view();
    p.dquery = dq.view(), p.dkey = dk.view(), p.dvalue = dv.view();
    p.key_begin = begin.p, p.key_end = end.p, p.lse = lse.p;
    p.dlse = shape.dlse ? dlse.p : nullptr;
    p.sinks = shape.sinks ? sinks.p : nullptr;
    p.dsinks = shape.sinks ? dsinks.p : nullptr;
    return p;
  }
  void run() {
    const AttentionBackwardParams p = params();
    emu::Buffer<char> forward(plain_forward_workspace_bytes(p)), backward(plain_backward_workspace_bytes(p));
    plain_forward(p, forward.p, kStream);
    plain_backward(p, backward.p, kStream);
  }
};

// ---- the same in plain loops ----------------------------------------------------------------------------------------

template <class R>
struct Result {
  std::vector<R> out, lse, dq, dk, dv, dsinks;
  // Largest sum of the sizes of what an element is the sum of: what cancels leaves its rounding.
  R dsinks_size = 0, dq_size = 0, dk_size = 0;
};

template <class R, class T>
Result<R> loops(Call<T>& c) {
  const Shape& s = c.shape;
  const int D = s.head_dim, Dv = s.head_dim_v, H = s.heads_q, Hk = s.heads_k;
  const int64_t rows = s.rows();
  const auto size = [](int64_t a, int64_t b, int64_t n) { return std::vector<R>(static_cast<size_t>(a * b * n)); };
  Result<R> r;
  r.out = size(rows, H, Dv), r.lse = size(H, rows, 1), r.dq = size(rows, H, D);
  r.dk = size(s.total_k, Hk, D), r.dv = size(s.total_k, Hk, Dv), r.dsinks = size(H, 1, 1);
  std::vector<R> key_size(static_cast<size_t>(s.total_k));
  constexpr R kElement = 4;  // about the largest of q and k
  const auto index = [](int64_t t, int heads, int h, int dim) { return static_cast<size_t>((t * heads + h) * dim); };
  for (int h = 0; h < H; ++h) {
    const int hk = h / (H / Hk);
    R sink_size = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t first = std::max(s.begin[i], 0), past = std::min<int64_t>(s.end[i], s.total_k);
      R& lse = r.lse[static_cast<size_t>(h * rows + i)];
      lse = -std::numeric_limits<R>::infinity();
      if (first >= past) continue;
      std::vector<R> score, slope;
      R top = s.sinks ? static_cast<R>(c.sinks[h]) : -std::numeric_limits<R>::infinity();
      for (int64_t j = first; j < past; ++j) {
        R z = 0;
        for (int d = 0; d < D; ++d) z += static_cast<R>(c.q.get(i, h, d)) * static_cast<R>(c.k.get(j, hk, d));
        z *= static_cast<R>(s.scale);
        const R t = s.softcap > 0 ? std::tanh(z / static_cast<R>(s.softcap)) : R(0);
        score.push_back(s.softcap > 0 ? static_cast<R>(s.softcap) * t : z);
        slope.push_back(1 - t * t);
        top = std::max(top, score.back());
      }
      R sum = s.sinks ? std::exp(static_cast<R>(c.sinks[h]) - top) : R(0);
      for (const R z : score) sum += std::exp(z - top);
      lse = top + std::log(sum);
      const size_t at = index(i, H, h, Dv);
      for (int64_t j = first; j < past; ++j) {
        const R p = std::exp(score[static_cast<size_t>(j - first)] - lse);
        for (int d = 0; d < Dv; ++d) r.out[at + d] += p * static_cast<R>(c.v.get(j, hk, d));
      }
      // A backward gets `out` as it was stored.
      R delta = s.dlse ? -static_cast<R>(c.dlse[static_cast<size_t>(h * rows + i)]) : R(0);
      for (int d = 0; d < Dv; ++d) delta += static_cast<R>(c.dout.get(i, h, d)) * static_cast<R>(c.out.get(i, h, d));
      if (s.sinks) {
        const R term = std::exp(static_cast<R>(c.sinks[h]) - lse) * delta;
        r.dsinks[static_cast<size_t>(h)] -= term;
        sink_size += std::abs(term);
      }
      R row_size = 0;
      for (int64_t j = first; j < past; ++j) {
        const R p = std::exp(score[static_cast<size_t>(j - first)] - lse);
        R dp = 0;
        for (int d = 0; d < Dv; ++d) dp += static_cast<R>(c.dout.get(i, h, d)) * static_cast<R>(c.v.get(j, hk, d));
        const R ds = p * (dp - delta) * slope[static_cast<size_t>(j - first)] * static_cast<R>(s.scale);
        const R size_of_ds = kElement * p * (std::abs(dp) + std::abs(delta)) * std::abs(static_cast<R>(s.scale));
        row_size += size_of_ds;
        key_size[static_cast<size_t>(j)] += size_of_ds;
        const size_t key = index(j, Hk, hk, D), value = index(j, Hk, hk, Dv), query = index(i, H, h, D);
        for (int d = 0; d < D; ++d) {
          r.dq[query + d] += ds * static_cast<R>(c.k.get(j, hk, d));
          r.dk[key + d] += ds * static_cast<R>(c.q.get(i, h, d));
        }
        for (int d = 0; d < Dv; ++d) r.dv[value + d] += p * static_cast<R>(c.dout.get(i, h, d));
      }
      r.dq_size = std::max(r.dq_size, row_size);
    }
    r.dsinks_size = std::max(r.dsinks_size, sink_size);
  }
  for (const R n : key_size) r.dk_size = std::max(r.dk_size, n);
  return r;
}

// got(n) is element n. error <= 2 * error of the float32 loops, rounded to T, + a floor of a few roundings: of the
// largest element to T, and of what it is the sum of, `size`, to float32.
template <class T, class Get>
void compare(const char* what, const std::vector<double>& right, const std::vector<float>& loops32, const Get& got,
             double size = 0) {
  constexpr double kUnit = std::is_same_v<T, float> ? 6e-8 : is_f16<T> ? 4.9e-4 : 3.9e-3;
  double largest = 0, error = 0, allowed = 0;
  for (size_t n = 0; n < right.size(); ++n) {
    const double x = static_cast<double>(got(n));
    if (std::isinf(right[n]) || std::isnan(x)) {
      if (!(x == right[n])) fail(std::string(what) + " is " + std::to_string(x) + " at " + std::to_string(n));
      continue;
    }
    largest = std::max(largest, std::fabs(right[n]));
    error = std::max(error, std::fabs(x - right[n]));
    allowed = std::max(allowed, std::fabs(static_cast<double>(decoded<T>(encoded<T>(loops32[n]))) - right[n]));
  }
  if (error > 2 * allowed + 4 * kUnit * largest + 4 * 6e-8 * size) {
    char text[200];
    std::snprintf(text, sizeof text, "%s: error %g, the loops' %g, largest %g", what, error, allowed, largest);
    fail(text);
  }
}

template <class T>
void check(const std::string& name, const Shape& shape) {
  now_running = name;
  Call<T> c(shape);
  c.run();
  const Result<double> right = loops<double>(c);
  const Result<float> loops32 = loops<float>(c);
  const auto tensor = [](Tensor<T>& x) {
    return [&x](size_t n) {
      const int64_t d = static_cast<int64_t>(n) % x.dim, h = static_cast<int64_t>(n) / x.dim % x.heads;
      return x.get(static_cast<int64_t>(n) / x.dim / x.heads, static_cast<int>(h), static_cast<int>(d));
    };
  };
  compare<T>("out", right.out, loops32.out, tensor(c.out));
  compare<float>("lse", right.lse, loops32.lse, [&](size_t n) { return c.lse[n]; });
  compare<T>("dq", right.dq, loops32.dq, tensor(c.dq), right.dq_size);
  compare<T>("dk", right.dk, loops32.dk, tensor(c.dk), right.dk_size);
  compare<T>("dv", right.dv, loops32.dv, tensor(c.dv));
  if (shape.sinks)
    compare<float>("dsinks", right.dsinks, loops32.dsinks, [&](size_t n) { return c.dsinks[n]; }, right.dsinks_size);
}

// ---- masks ----------------------------------------------------------------------------------------------------------

struct Document {
  int64_t q, k;
};

// Documents one after the other; q < 0: rows that see nothing. window < 0: none.
Shape packed(const std::vector<Document>& documents, bool causal = true, int64_t window = -1) {
  Shape s;
  for (const Document& one : documents) {
    for (int64_t i = 0; i < std::abs(one.q); ++i) {
      const int64_t diagonal = s.total_k + one.k - std::abs(one.q) + i;
      int64_t low = s.total_k, high = causal ? std::min(diagonal + 1, s.total_k + one.k) : s.total_k + one.k;
      if (window >= 0) low = std::max(low, diagonal - window);
      if (one.q < 0) low = high = s.total_k;
      s.begin.push_back(static_cast<int32_t>(low));
      s.end.push_back(static_cast<int32_t>(std::max(high, low)));
    }
    s.total_k += one.k;
  }
  return s;
}
std::vector<Document> lengths(const std::vector<int64_t>& all) {
  std::vector<Document> documents;
  for (const int64_t n : all) documents.push_back({n, std::abs(n)});
  return documents;
}

template <class T>
Shape random_shape() {
  std::vector<Document> documents;
  const int64_t picks[] = {1, 2, 3, 5, 17, 31, 63, 64, 65, 66, 100, 127, 128, 129};
  for (int64_t left = 1 + below(220); left > 0; left -= std::abs(documents.back().q)) {
    const int64_t q = std::min(left, picks[below(14)]);
    documents.push_back({below(8) == 0 ? -q : q, below(3) == 0 ? picks[below(14)] : q});
    if (below(9) == 0) documents.push_back({0, below(4)});
  }
  Shape s = packed(documents, below(3) != 0, below(3) == 0 ? below(90) : -1);
  s.heads_k = 1 + static_cast<int>(below(2));
  s.heads_q = s.heads_k * (1 + static_cast<int>(below(2)));
  const int dims[] = {8, 16, 24, 33, 40, 64, 72};
  s.head_dim = dims[below(7)], s.head_dim_v = dims[below(7)];
  s.scale = below(4) == 0 ? normal() : 1.f / std::sqrt(static_cast<float>(s.head_dim));
  s.softcap = below(3) == 0 ? 2.f : 0.f;
  s.sinks = below(2) == 0, s.dlse = below(2) == 0;
  s.layout = static_cast<Layout>(below(4));
  return s;
}

// ---- what a document's neighbours may not change --------------------------------------------------------------------

template <class T>
void copy_document(Tensor<T>& to, Tensor<T>& from, int64_t first) {
  for (int64_t t = 0; t < to.rows; ++t) {
    for (int h = 0; h < to.heads; ++h) {
      for (int d = 0; d < to.dim; ++d) to.at(t, h, d) = from.at(first + t, h, d);
    }
  }
}
template <class T>
void same_bits(const char* what, Tensor<T>& alone, Tensor<T>& other, int64_t first) {
  for (int64_t t = 0; t < alone.rows; ++t) {
    for (int h = 0; h < alone.heads; ++h) {
      if (std::memcmp(&alone.at(t, h, 0), &other.at(first + t, h, 0), sizeof(Stored<T>) * alone.dim) != 0) {
        fail(std::string(what) + ": other bits at row " + std::to_string(t));
      }
    }
  }
}

// Every document alone; then with the others replaced by NaN.
template <class T>
void check_neighbours(const std::vector<Document>& documents, bool causal, int64_t window, int dim) {
  now_running = "neighbours";
  Shape shape = packed(documents, causal, window);
  shape.head_dim = shape.head_dim_v = dim;
  shape.softcap = below(2) == 0 ? 3.f : 0.f;
  shape.dlse = true;
  Call<T> all(shape);
  all.run();
  int64_t first_q = 0, first_k = 0;
  for (const Document& one : documents) {
    Shape part = packed({one}, causal, window);
    part.head_dim = part.head_dim_v = dim;
    part.softcap = shape.softcap;
    part.dlse = true;
    Call<T> alone(part);
    copy_document(alone.q, all.q, first_q);
    copy_document(alone.dout, all.dout, first_q);
    copy_document(alone.k, all.k, first_k);
    copy_document(alone.v, all.v, first_k);
    for (int h = 0; h < part.heads_q; ++h) {
      for (int64_t i = 0; i < part.rows(); ++i) {
        alone.dlse[static_cast<size_t>(h * part.rows() + i)] =
            all.dlse[static_cast<size_t>(h * shape.rows() + first_q + i)];
      }
    }
    alone.run();
    const auto compare_with = [&](Call<T>& other) {
      same_bits("out", alone.out, other.out, first_q);
      same_bits("dq", alone.dq, other.dq, first_q);
      same_bits("dk", alone.dk, other.dk, first_k);
      same_bits("dv", alone.dv, other.dv, first_k);
    };
    compare_with(all);

    const float nan = std::numeric_limits<float>::quiet_NaN();
    Call<T> poisoned(shape);
    const auto poison = [&](Tensor<T>& to, Tensor<T>& from, int64_t first, int64_t count) {
      for (int64_t t = 0; t < to.rows; ++t) {
        for (int h = 0; h < to.heads; ++h) {
          for (int d = 0; d < to.dim; ++d) {
            to.set(t, h, d, first <= t && t < first + count ? from.get(t, h, d) : nan);
          }
        }
      }
    };
    poison(poisoned.q, all.q, first_q, std::abs(one.q));
    poison(poisoned.dout, all.dout, first_q, std::abs(one.q));
    poison(poisoned.k, all.k, first_k, one.k);
    poison(poisoned.v, all.v, first_k, one.k);
    std::copy(all.dlse.p, all.dlse.p + all.dlse.n, poisoned.dlse.p);
    poisoned.run();
    compare_with(poisoned);
    first_q += std::abs(one.q);
    first_k += one.k;
  }
}

// What rows that see nothing and keys that nobody sees hold decides nothing, not even what they get themselves.
template <class T>
void check_padding(const std::vector<int64_t>& all_lengths, bool causal) {
  now_running = "padding";
  Shape shape = packed(lengths(all_lengths), causal);
  shape.dlse = true;
  Call<T> clean(shape), dirty(shape);
  std::copy(clean.dlse.p, clean.dlse.p + clean.dlse.n, dirty.dlse.p);
  Tensor<T>* from[] = {&clean.q, &clean.k, &clean.v, &clean.dout};
  Tensor<T>* to[] = {&dirty.q, &dirty.k, &dirty.v, &dirty.dout};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int n = 0; n < 4; ++n) copy_document(*to[n], *from[n], 0);
  int64_t first = 0;
  for (const int64_t length : all_lengths) {
    for (int64_t i = first; length < 0 && i < first - length; ++i) {
      for (Tensor<T>* x : to) {
        for (int h = 0; h < x->heads; ++h) {
          for (int d = 0; d < x->dim; ++d) x->set(i, h, d, nan);
        }
      }
      for (int h = 0; h < shape.heads_q; ++h) dirty.dlse[static_cast<size_t>(h * shape.rows() + i)] = nan;
    }
    first += std::abs(length);
  }
  clean.run();
  dirty.run();
  same_bits("out", clean.out, dirty.out, 0);
  same_bits("dq", clean.dq, dirty.dq, 0);
  same_bits("dk", clean.dk, dirty.dk, 0);
  same_bits("dv", clean.dv, dirty.dv, 0);
}

// Inside a causal document, NaN in key and query `at` reaches nobody who is not on one side of it.
void check_causal_nan(int64_t rows, int64_t at) {
  now_running = "NaN inside a document";
  const Shape shape = packed(lengths({rows}));
  Call<float> clean(shape), dirty(shape);
  copy_document(dirty.q, clean.q, 0);
  copy_document(dirty.k, clean.k, 0);
  copy_document(dirty.v, clean.v, 0);
  copy_document(dirty.dout, clean.dout, 0);
  for (int d = 0; d < shape.head_dim; ++d) {
    for (Tensor<float>* x : {&dirty.k, &dirty.v}) x->set(at, 0, d, std::numeric_limits<float>::quiet_NaN());
    dirty.q.set(rows - 1 - at, 0, d, std::numeric_limits<float>::infinity());
  }
  clean.run();
  dirty.run();
  for (int64_t i = 0; i < std::min(at, rows - 1 - at); ++i) {
    for (int d = 0; d < shape.head_dim; ++d) {
      if (dirty.out.get(i, 0, d) != clean.out.get(i, 0, d)) fail("out of a row that does not see the NaN");
      if (dirty.dq.get(i, 0, d) != clean.dq.get(i, 0, d)) fail("dq of a row that does not see the NaN");
    }
  }
  if (!std::isnan(dirty.out.get(rows - 1, 1, 0))) fail("a NaN that a row sees must show");
}

// An infinite query and gradient in row `at` reach no key that it does not see.
void check_infinite_row(const Shape& shape, int64_t at) {
  now_running = "an infinite row";
  Call<float> clean(shape), infinite(shape);
  copy_document(infinite.q, clean.q, 0);
  copy_document(infinite.k, clean.k, 0);
  copy_document(infinite.v, clean.v, 0);
  copy_document(infinite.dout, clean.dout, 0);
  for (int d = 0; d < shape.head_dim; ++d) {
    for (Tensor<float>* x : {&infinite.q, &infinite.dout}) x->set(at, 0, d, std::numeric_limits<float>::infinity());
  }
  clean.run();
  infinite.run();
  const size_t row = static_cast<size_t>(at);
  for (int64_t j = 0; j < shape.total_k; ++j) {
    if (shape.begin[row] <= j && j < shape.end[row]) continue;
    for (int d = 0; d < shape.head_dim; ++d) {
      if (infinite.dk.get(j, 0, d) != clean.dk.get(j, 0, d)) fail("dk of a key that the row does not see");
      if (infinite.dv.get(j, 0, d) != clean.dv.get(j, 0, d)) fail("dv of a key that the row does not see");
    }
  }
}

// Any values at all: nothing outside the buffers, everything written, nothing but NaN's own kind of number wrong.
void check_garbage() {
  now_running = "garbage";
  Shape shape = random_shape<bf16_t>();
  using Limits = std::numeric_limits<int32_t>;
  const int32_t values[] = {Limits::min(), Limits::max(), -1, 0, 1, static_cast<int32_t>(shape.total_k)};
  for (auto* x : {&shape.begin, &shape.end}) {
    for (int32_t& value : *x) {
      if (below(3) == 0) value = below(2) == 0 ? static_cast<int32_t>(generator()) : values[below(6)];
    }
  }
  Call<bf16_t> c(shape);
  c.run();
  const Result<double> right = loops<double>(c);  // the forward does not need ranges in order
  for (size_t n = 0; n < right.lse.size(); ++n) {
    if (!(std::fabs(static_cast<double>(c.lse[n]) - right.lse[n]) < 1e-3) &&
        static_cast<double>(c.lse[n]) != right.lse[n])
      fail("lse under ranges that are not in order");
  }
  for (Tensor<bf16_t>* x : {&c.dq, &c.dk, &c.dv}) {
    for (int64_t t = 0; t < x->rows; ++t) {
      for (int h = 0; h < x->heads; ++h) {
        for (int d = 0; d < x->dim; ++d) {
          if (std::isnan(x->get(t, h, d))) fail("a gradient that was not written");
        }
      }
    }
  }
}

void infinite_sinks() {
  now_running = "infinite sinks";
  Shape shape = packed(lengths({40, 9}));
  shape.sinks = true;
  Call<float> c(shape);
  c.sinks[0] = std::numeric_limits<float>::infinity();
  c.sinks[1] = -std::numeric_limits<float>::infinity();
  c.run();
  for (int64_t i = 0; i < shape.rows(); ++i) {
    if (c.out.get(i, 0, 0) != 0.f || c.dq.get(i, 0, 0) != 0.f) fail("a sink of +inf takes all the weight");
    if (c.lse[static_cast<size_t>(i)] != std::numeric_limits<float>::infinity()) fail("lse with a sink of +inf");
    if (!std::isfinite(c.out.get(i, 1, 0)) || !std::isfinite(c.dq.get(i, 1, 0))) fail("a sink of -inf takes none");
  }
}

template <class T>
void fixed_cases(const char* dtype) {
  const std::string name = dtype;
  Shape s = packed(lengths({100, 28, 1, 71}));
  s.head_dim = s.head_dim_v = 64;
  s.scale = 0.125f;
  check<T>(name + " causal", s);
  s = packed(lengths({65, -9, 70}), false);
  s.sinks = s.dlse = true;
  check<T>(name + " bidirectional", s);
  s = packed({{0, 3}, {9, 4}, {4, 90}, {70, 3}, {-5, 0}});
  s.heads_q = 4, s.heads_k = 2, s.sinks = true;
  check<T>(name + " other keys than queries", s);
  s = packed(lengths({5, 3}));
  s.scale = 0.f, s.head_dim = 5, s.head_dim_v = 3;
  check<T>(name + " scale 0", s);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 4;
  if (argc > 2) generator.seed(static_cast<uint64_t>(std::atoll(argv[2])));
  try {
    fixed_cases<float>("float32");
    fixed_cases<bf16_t>("bfloat16");
    fixed_cases<f16_t>("float16");
    Shape wide = packed(lengths({150}), true, 20);
    wide.head_dim = 192, wide.head_dim_v = 128, wide.softcap = 3.f, wide.layout = Layout::odd;
    check<float>("window, 192/128", wide);
    wide = packed(lengths({20, 50}));
    wide.head_dim = 320, wide.head_dim_v = 512, wide.heads_q = 1, wide.scale = -0.05f;
    check<f16_t>("320/512", wide);
    check<float>("nothing", Shape{});
    check<float>("no rows", packed({{0, 70}}));
    check<float>("no keys", packed({{70, 0}}));
    check<float>("nothing seen", packed(lengths({-70})));
    infinite_sinks();
    check_padding<float>({-3, 20, -10, 70, -7}, true);
    check_padding<bf16_t>({-3, 20, -10, 70, -70}, false);
    check_causal_nan(100, 70);
    check_causal_nan(100, 10);
    check_infinite_row(packed(lengths({100})), 70);
    // Rows of which some see one more group of four keys: whether to mask is decided for each group.
    check_infinite_row(packed({{64, 100}}), 0);
    check_neighbours<float>(lengths({70, 1, -3, 40, 129}), true, -1, 24);
    check_neighbours<bf16_t>({{33, 70}, {70, 33}, {5, 0}, {66, 66}}, true, -1, 16);
    check_neighbours<f16_t>(lengths({70, 3, 40}), false, 9, 16);
    for (int i = 0; i < rounds; ++i) {
      check<float>("random float32", random_shape<float>());
      check<bf16_t>("random bfloat16", random_shape<bf16_t>());
      check<f16_t>("random float16", random_shape<f16_t>());
      check_garbage();
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", now_running.c_str(), error.what());
    return 1;
  }
  std::printf("attention_plain: fixed cases and %d random ones right\n", 3 * rounds);
  return 0;
}
