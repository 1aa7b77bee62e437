// Register tiles, packing and prefetch. No attention logic here. Include it after the instruction set's simd_*.h.
//
// Two packed shapes, both made of 16-wide panels so that every inner loop reads contiguous lines:
//   cols  [n/NR][D][NR]   element (d, j)  at (j/NR)*D*NR + d*NR + j%NR    (a transposed block)
//   rows  [D/NR][n][NR]   element (i, d)  at (d/NR)*n*NR + i*NR + d%NR    (a row block; also read element by
//                                                                          element as the broadcast operand)
#pragma once

namespace packattn::cpu::PACKATTN_ISA {

constexpr float kInf = __builtin_inff();
constexpr int NR = 16;       // columns of a register tile
constexpr int NV = NR / VW;  // vectors across it

constexpr int imin(int a, int b) { return a < b ? a : b; }
constexpr int imax(int a, int b) { return a > b ? a : b; }

// GCC would split the addresses below into many induction variables, run out of registers and keep accumulators in
// memory; pointers it cannot see through stop that (measured: 13 to 19 %).
#define PACKATTN_OPAQUE(a, b) asm("" : "+r"(a), "+r"(b))

template <int M>
struct Acc {
  vf v[M][NV];
};

template <int M>
PACKATTN_INLINE void acc_zero(Acc<M>& c) {
  PACKATTN_UNROLL for (int i = 0; i < M; i++) PACKATTN_UNROLL for (int n = 0; n < NV; n++) c.v[i][n] = vzero();
}
template <int M>
PACKATTN_INLINE void acc_load(Acc<M>& c, const float* p, int64_t ld) {
  PACKATTN_UNROLL for (int i = 0; i < M; i++)
    PACKATTN_UNROLL for (int n = 0; n < NV; n++) c.v[i][n] = vload(p + i * ld + n * VW);
}
template <int M>
PACKATTN_INLINE void acc_store(const Acc<M>& c, float* p, int64_t ld) {
  PACKATTN_UNROLL for (int i = 0; i < M; i++)
    PACKATTN_UNROLL for (int n = 0; n < NV; n++) vstore(p + i * ld + n * VW, c.v[i][n]);
}
// columns outside [lo[i], hi[i]) become `other`; the tile's first column is number j0
template <int M>
PACKATTN_INLINE void acc_keep(Acc<M>& c, int j0, const float* lo, const float* hi, vf other) {
  const vf j = vadd(viota(), vset(static_cast<float>(j0)));
  PACKATTN_UNROLL for (int i = 0; i < M; i++)
    PACKATTN_UNROLL for (int n = 0; n < NV; n++)
        c.v[i][n] = vkeep(c.v[i][n], vadd(j, vset(n * VW)), vset(lo[i]), vset(hi[i]), other);
}

// One step of a product: c[i][:] += a[i * stride] * b[:]
template <int M>
PACKATTN_INLINE void acc_step(Acc<M>& c, const float* a, int stride, const float* b) {
  vf x[NV];
  PACKATTN_UNROLL for (int n = 0; n < NV; n++) x[n] = vload(b + n * VW);
  PACKATTN_UNROLL for (int i = 0; i < M; i++) {
    const vf y = vbcast(a + i * stride);
    PACKATTN_UNROLL for (int n = 0; n < NV; n++) c.v[i][n] = vfma(y, x[n], c.v[i][n]);
  }
}
// c[i][j] = sum_d a(i, d) * b(d, j); a: rows panels, a_panel floats apart; b: one cols panel. D % 8 == 0.
template <int M>
PACKATTN_INLINE void tile_dot(Acc<M>& c, const float* a, int64_t a_panel, const float* b, int D) {
  acc_zero(c);
  for (; D >= NR; D -= NR) {
    PACKATTN_UNROLL for (int k = 0; k < NR; k++) acc_step(c, a + k, NR, b + k * NR);
    a += a_panel;
    b += NR * NR;
    PACKATTN_OPAQUE(a, b);
  }
  if (D) {
    PACKATTN_UNROLL for (int k = 0; k < 8; k++) acc_step(c, a + k, NR, b + k * NR);
  }
}
// c[i][j] += sum_{k0 <= k < k1} a[i*AI + k*AK] * b[k*NR + j]
template <int M, int AI, int AK>
PACKATTN_INLINE void tile_acc(Acc<M>& c, const float* a, const float* b, int k0, int k1) {
  a += static_cast<int64_t>(k0) * AK;
  b += static_cast<int64_t>(k0) * NR;
  int n = k1 - k0;
  for (; n >= 4; n -= 4) {
    PACKATTN_UNROLL for (int k = 0; k < 4; k++) acc_step(c, a + k * AK, AI, b + k * NR);
    a += 4 * AK;
    b += 4 * NR;
    PACKATTN_OPAQUE(a, b);
  }
  for (; n > 0; n--) {
    acc_step(c, a, AI, b);
    a += AK;
    b += NR;
  }
}

// The functions F<1>, F<2> .. F<MR> of a tile, by its rows.
#define PACKATTN_BY_ROWS_(F, ...)                                           \
  switch (rows_) {                                                          \
    case 1: F<1>(__VA_ARGS__); break;                                       \
    case 2: F<2>(__VA_ARGS__); break;                                       \
    case 3: F<3>(__VA_ARGS__); break;                                       \
    case 4: if constexpr (MR >= 4) F<4>(__VA_ARGS__); break;                \
    case 5: if constexpr (MR >= 5) F<5>(__VA_ARGS__); break;                \
    case 6: if constexpr (MR >= 6) F<6>(__VA_ARGS__); break;                \
    case 7: if constexpr (MR >= 7) F<7>(__VA_ARGS__); break;                \
    case 8: if constexpr (MR >= 8) F<8>(__VA_ARGS__); break;                \
    case 9: if constexpr (MR >= 9) F<9>(__VA_ARGS__); break;                \
    case 10: if constexpr (MR >= 10) F<10>(__VA_ARGS__); break;             \
    case 11: if constexpr (MR >= 11) F<11>(__VA_ARGS__); break;             \
    case 12: if constexpr (MR >= 12) F<12>(__VA_ARGS__); break;             \
    default: __builtin_trap();                                              \
  }
#define PACKATTN_BY_ROWS(rows, F, ...)    \
  do {                                    \
    const int rows_ = (rows);             \
    PACKATTN_BY_ROWS_(F, __VA_ARGS__)     \
  } while (0)

// n rows divided as evenly as possible (8 is 4 + 4, not 6 + 2): a short tile cannot hide the latency of an FMA.
// Calls f(first row, rows).
template <class F>
PACKATTN_INLINE void even_groups(int n, F&& f) {
  const int groups = ceil_div(n, MR), size = n / groups, more = n % groups;
  for (int i = 0, m = 0; i < groups; i++) {
    const int w = size + (i < more);
    f(m, w);
    m += w;
  }
}

// Rows to bring into L2 while the current tiles are computed, so that the packers (and the final stores) hit. A few
// lines with each tile: more at once than the core has line fill buffers would stop it.
class Ahead {
 public:
  template <class T>
  PACKATTN_NOINLINE void add(const T* p, int64_t ld, int rows, int columns, bool write = false) {
    if (rows <= 0 || count_ == kStreams) return;
    const int lines = (columns * static_cast<int>(sizeof(T)) + 63) / 64;
    streams_[count_++] = {reinterpret_cast<const char*>(p), ld * static_cast<int64_t>(sizeof(T)), rows, lines, write};
    total_ += rows * lines;
  }
  // to be called before step() is called about `steps` times
  void spread(int steps) { per_step_ = total_ / imax(1, steps) + 1; }
  PACKATTN_ALWAYS void step() {
    if (at_ < count_) pull(per_step_);
  }
  PACKATTN_ALWAYS void step(int steps) {
    if (at_ < count_) pull(steps * per_step_);
  }

 private:
  static constexpr int kStreams = 8;
  struct Stream {
    const char* p;
    int64_t row;
    int rows, lines;
    bool write;
  };
  PACKATTN_ALWAYS void pull(int n) {  // inline: a call inside the tile loop cost 7 %
    for (; n > 0 && at_ < count_; n--) {
      Stream& s = streams_[at_];
      if (s.write) {
        __builtin_prefetch(s.p + line_ * 64, 1, 2);
      } else {
        __builtin_prefetch(s.p + line_ * 64, 0, 2);
      }
      if (++line_ < s.lines) continue;
      line_ = 0;
      s.p += s.row;
      if (--s.rows == 0) at_++;
    }
  }
  Stream streams_[kStreams];
  int count_ = 0, at_ = 0, line_ = 0, total_ = 0, per_step_ = 0;
};

// The vector of a row that starts `left` elements before the row's end; missing elements are 0.
template <class T>
PACKATTN_INLINE vf load_tail(const T* p, int left) {
  if (left >= VW) return vload(p);
  return left >= 8 ? vload_half(p) : vzero();
}
template <class T>
PACKATTN_INLINE void store_tail(T* p, vf x, int left) {
  if (left >= VW) {
    vstore(p, x);
  } else if (left >= 8) {
    vstore_half(p, x);
  }
}
// The same for out: past the caches if `stream` (ForwardContext::stream_out; then rows are whole, aligned vectors).
template <class T>
PACKATTN_INLINE void store_out(T* p, vf x, int left, bool stream) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (stream && left >= VW) return vstream(p, x);
  }
  store_tail(p, x, left);
}

// rows packing: n rows of x (ld apart) times s into panels that are `panel` floats apart; columns from D to a
// multiple of NR become 0. Returns whether all of x is finite, if Check.
template <bool Check, class T>
PACKATTN_NOINLINE static bool pack_rows(float* dst, int64_t panel, const T* x, int64_t ld, int n, int D, float s) {
  const vf vs = vset(s);
  vf zero_or_nan[2 * NV];  // several, as one would be a chain of latencies
  PACKATTN_UNROLL for (int v = 0; v < 2 * NV; v++) zero_or_nan[v] = vzero();
  const auto panel_row = [&](int d, int i, vf* check) __attribute__((always_inline)) {
    float* o = dst + (d / NR) * panel + i * NR;
    PACKATTN_UNROLL for (int v = 0; v < NV; v++) {
      const vf y = load_tail(x + d + v * VW, D - d - v * VW);
      if constexpr (Check) check[v] = vfma(y, vzero(), check[v]);
      vstore(o + v * VW, vmul(y, vs));
    }
  };
  for (int i = 0; i < n; i++, x += ld) {
    int d = 0;
    for (; d + NR < D; d += 2 * NR) {
      panel_row(d, i, zero_or_nan);
      panel_row(d + NR, i, zero_or_nan + NV);
    }
    if (d < D) panel_row(d, i, zero_or_nan);
  }
  PACKATTN_UNROLL for (int v = 1; v < 2 * NV; v++) zero_or_nan[0] = vadd(zero_or_nan[0], zero_or_nan[v]);
  return !Check || vhsum(zero_or_nan[0]) == 0.f;
}
// cols packing: n rows of x into ceil(n / NR) transposed panels [D][NR] that are `panel` floats apart; missing columns
// become 0
template <class T>
PACKATTN_NOINLINE static void pack_cols(float* dst, int64_t panel, const T* x, int64_t ld, int n, int D) {
  for (int j = 0; j < round_up(n, NR); j += VW) {
    float* o = dst + (j / NR) * panel + j % NR;
    for (int d = 0; d < D; d += VW) {
      vf r[VW];
      if (j + VW <= n && d + VW <= D) {
        PACKATTN_UNROLL for (int i = 0; i < VW; i++) r[i] = vload(x + (j + i) * ld + d);
      } else {
        for (int i = 0; i < VW; i++) r[i] = j + i < n ? load_tail(x + (j + i) * ld + d, D - d) : vzero();
      }
      vtranspose(r);
      if (d + VW <= D) {
        PACKATTN_UNROLL for (int i = 0; i < VW; i++) vstore(o + (d + i) * NR, r[i]);
      } else if constexpr (VW > 8) {
        PACKATTN_UNROLL for (int i = 0; i < 8; i++) vstore(o + (d + i) * NR, r[i]);
      }
    }
  }
}

template <class T>
PACKATTN_INLINE T* at(const TensorView& x, int64_t row, int64_t head) {
  return static_cast<T*>(x.data) + row * x.row_stride + head * x.head_stride;
}

// Rows that a tile treats alike: n <= MR rows from row m of the block, and the extremes of their key ranges.
struct Group {
  int m, n;
  int lo0, lo1, hi0, hi1;
  bool started;  // the output tile already holds something

  bool sees(int j0, int j1) const { return j0 < hi1 && j1 > lo0; }      // some row sees one of the keys [j0, j1)
  bool needs_mask(int j0, int j1) const { return j0 < lo1 || j1 > hi0; }  // some row misses one of them
};

// Hands out 64-byte aligned pieces of a worker's scratch. Without a base it only counts.
struct Carve {
  float* base;
  size_t used = 0;
  float* take(size_t floats) {
    float* p = base ? base + used : nullptr;
    used += (floats + 15) & ~static_cast<size_t>(15);
    return p;
  }
};

}  // namespace packattn::cpu::PACKATTN_ISA
