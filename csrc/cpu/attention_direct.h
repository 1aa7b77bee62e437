// Documents of at most 16 rows and 16 keys, for which packing would cost more than the products. Rows are copied once
// (as they lie in memory they often share a cache set, as a row of all heads is a power of two). Scores are dot
// products along the head dimension, kept transposed (a key's scores of all rows side by side), so that the softmax
// needs no sum across lanes; the other products combine rows. Each sum runs over exactly the pairs that see each
// other. All heads are done together, while the rows of the next document are prefetched one after the other.
// Included by the file of each instruction set.
#pragma once
#include "attention_kernels.h"
#include "tile.h"

namespace packattn::cpu::PACKATTN_ISA {

// Who sees whom in one document. Numbers count from its first row and first key.
struct DirectMask {
  int r0, k0, rows, keys;
  int key_begin[kDirect], key_end[kDirect];    // keys that a row sees; none for rows past the last
  int row_begin[kDirect], row_end[kDirect];    // rows that see a key
  alignas(64) float lo[kDirect], hi[kDirect];  // key_begin, key_end

  DirectMask(const AttentionForwardParams& p, const Segment& s, const Run& run)
      : r0(run.q0), k0(s.k0), rows(run.q1 - run.q0), keys(s.k1 - s.k0) {
    for (int j = 0; j < kDirect; j++) row_begin[j] = row_end[j] = 0;
    for (int i = 0; i < kDirect; i++) {
      key_begin[i] = i < rows ? p.key_begin[r0 + i] - k0 : 0;
      key_end[i] = i < rows ? p.key_end[r0 + i] - k0 : 0;
      lo[i] = static_cast<float>(key_begin[i]);
      hi[i] = static_cast<float>(key_end[i]);
      for (int j = key_begin[i]; j < key_end[i]; j++) {
        if (row_end[j] == 0) row_begin[j] = i;
        row_end[j] = i + 1;
      }
    }
  }
};

// rows of `columns` elements as floats, direct_stride(columns) apart; columns up to a multiple of 16 become 0
constexpr int direct_stride(int columns) { return padded_dim(columns) + 16; }
template <class T>
PACKATTN_INLINE void copy_rows(float* to, const T* x, int64_t ld, int rows, int columns) {
  for (int i = 0; i < rows; i++, x += ld, to += direct_stride(columns))
    for (int d = 0; d < padded_dim(columns); d += VW) vstore(to + d, load_tail(x + d, columns - d));
}

// z[j * kDirect + i] = <x row i, y key j>, for blocks of 4 rows x 2 keys in which somebody sees something
PACKATTN_NOINLINE static void direct_dots(const DirectMask& m, float* z, const float* x, const float* y, int D,
                                          Ahead& ahead) {
  const int ld = direct_stride(D);
  for (int i = 0; i < m.rows; i += 4) {
    const int last = imin(i + 3, m.rows - 1);
    const float* xs[4];
  PACKATTN_UNROLL for (int r = 0; r < 4; r++) xs[r] = x + imin(i + r, last) * ld;
    for (int j = m.key_begin[i] & ~1; j < m.key_end[last]; j += 2) {
      ahead.step();
      const float *y0 = y + j * ld, *y1 = y + imin(j + 1, m.keys - 1) * ld;
      vf c[2][4];
      PACKATTN_UNROLL for (int r = 0; r < 4; r++) c[0][r] = c[1][r] = vzero();
      for (int d = 0; d < D; d += VW) {
        const vf a = vload(y0 + d), b = vload(y1 + d);
        PACKATTN_UNROLL for (int r = 0; r < 4; r++) {
          const vf q = vload(xs[r] + d);
          c[0][r] = vfma(q, a, c[0][r]);
          c[1][r] = vfma(q, b, c[1][r]);
        }
      }
      vstore_sums(z + j * kDirect + i, c[0]);
      vstore_sums(z + (j + 1) * kDirect + i, c[1]);
    }
  }
}

// to[i] = sum over j in [begin[i], end[i]) of a[i * AI + j * AJ] * from[j]; added to what is there if `add`
template <class To, int AI, int AJ>
struct Combine {
  To* to;
  int64_t ld_to;
  const float* from;
  const float* a;
  const int *begin, *end;
  int columns;
  bool add, stream;
  Ahead& ahead;

  template <int M>
  PACKATTN_NOINLINE void block(int i) const {
    // all M rows take the terms [c0, c1); some take others in [e0, e1)
    int c0 = begin[i], c1 = end[i], e0 = c0, e1 = c1;
    PACKATTN_UNROLL for (int r = 1; r < M; r++) {
      c0 = imax(c0, begin[i + r]);
      c1 = imin(c1, end[i + r]);
      e0 = imin(e0, begin[i + r]);
      e1 = imax(e1, end[i + r]);
    }
    if (c1 <= c0) c0 = c1 = e1;
    const int ld = direct_stride(columns);
    for (int d = 0; d < columns; d += NR) {
      ahead.step();
      Acc<M> c;
      acc_zero(c);
      if (add) {
        PACKATTN_UNROLL for (int r = 0; r < M; r++) {
          PACKATTN_UNROLL for (int n = 0; n < NV; n++) {
            c.v[r][n] = load_tail(to + (i + r) * ld_to + d + n * VW, columns - d - n * VW);
          }
        }
      }
      const auto term = [&](int j, bool all) __attribute__((always_inline)) {
        vf x[NV];
        PACKATTN_UNROLL for (int n = 0; n < NV; n++) x[n] = vload(from + j * ld + d + n * VW);
        PACKATTN_UNROLL for (int r = 0; r < M; r++) {
          if (!all && (j < begin[i + r] || j >= end[i + r])) continue;
          const vf y = vbcast(a + (i + r) * AI + j * AJ);
          PACKATTN_UNROLL for (int n = 0; n < NV; n++) c.v[r][n] = vfma(y, x[n], c.v[r][n]);
        }
      };
      for (int j = e0; j < c0; j++) term(j, false);
      for (int j = c0; j < c1; j++) term(j, true);
      for (int j = c1; j < e1; j++) term(j, false);
      PACKATTN_UNROLL for (int r = 0; r < M; r++) {
        PACKATTN_UNROLL for (int n = 0; n < NV; n++) {
          store_out(to + (i + r) * ld_to + d + n * VW, c.v[r][n], columns - d - n * VW, stream);
        }
      }
    }
  }
  void run(int count) const {
    constexpr int M = NV == 1 ? 8 : NV == 2 ? 4 : 2;  // 8 accumulators
    int i = 0;
    for (; i + M <= count; i += M) block<M>(i);
    if constexpr (M > 4) {
      for (; i + 4 <= count; i += 4) block<4>(i);
    }
    for (; M > 2 && i + 2 <= count; i += 2) block<2>(i);
    for (; i < count; i++) block<1>(i);
  }
};

// Rows of all heads, if they lie side by side. (If not, each head's rows do, and the hardware sees that itself.)
template <class T>
PACKATTN_INLINE void prefetch_heads(Ahead& ahead, const TensorView& x, int row, int rows, int heads, int columns,
                                    bool write = false) {
  if (x.head_stride != columns) return;
  ahead.add(at<T>(x, row, 0), x.row_stride, rows, heads * columns, write);
}

template <class T>
PACKATTN_NOINLINE static void direct_forward_head(const AttentionForwardParams& p, const DirectMask& m,
                                                  Ahead& ahead, int hq, int h, bool new_keys, bool stream,
                                                  float* scratch) {
  const int D = p.head_dim, Dv = p.head_dim_v;
  float *query = scratch, *key = query + kDirect * direct_stride(D), *value = key + kDirect * direct_stride(D);
  copy_rows(query, at<const T>(p.query, m.r0, hq), p.query.row_stride, m.rows, D);
  if (new_keys) {
    copy_rows(key, at<const T>(p.key, m.k0, h), p.key.row_stride, m.keys, D);
    copy_rows(value, at<const T>(p.value, m.k0, h), p.value.row_stride, m.keys, Dv);
  }
  alignas(64) float z[kDirect * (kDirect + 1)];
  direct_dots(m, z, query, key, D, ahead);
  alignas(64) float lse[kDirect];
  const bool capped = p.softcap > 0.f;
  const vf scale = vset(capped ? p.scale / p.softcap : p.scale), cap = vset(p.softcap), ninf = vset(-kInf);
  for (int i = 0; i < m.rows; i += VW) {
    const vf lo = vload(m.lo + i), hi = vload(m.hi + i), sink = vset(p.sinks ? p.sinks[hq] : -kInf);
    vf top = sink;
    for (int j = 0; j < m.keys; j++) {
      vf s = vmul(vload(z + j * kDirect + i), scale);
      if (capped) s = vmul(cap, vtanh(s));
      s = vkeep(s, vset(static_cast<float>(j)), lo, hi, ninf);
      vstore(z + j * kDirect + i, s);
      top = vmax(top, s);
    }
    const vf reference = vselect_less(ninf, top, top, vzero());
    vf sum = p.sinks ? vexp(vsub(sink, reference)) : vzero();
    sum = vselect_less(vset(__FLT_MAX__), sink, vset(1.f), sum);  // an infinite sink takes all; NaN stays NaN
    for (int j = 0; j < m.keys; j++) {
      const vf e = vexp(vsub(vload(z + j * kDirect + i), reference));
      vstore(z + j * kDirect + i, e);
      sum = vadd(sum, e);
    }
    const vf inverse = vdiv(vset(1.f), sum);
    for (int j = 0; j < m.keys; j++) vstore(z + j * kDirect + i, vmul(vload(z + j * kDirect + i), inverse));
    vstore(lse + i, vadd(top, vlog(sum)));
  }
  __builtin_memcpy(p.lse + hq * p.total_q + m.r0, lse, m.rows * sizeof(float));
  T* out = at<T>(p.out, m.r0, hq);
  Combine<T, 1, kDirect>{out, p.out.row_stride, value, z, m.key_begin, m.key_end, Dv, false, stream, ahead}.run(m.rows);
}

// A kv head's sums over its query heads are kept in scratch, unless it has only one.
template <class T>
PACKATTN_NOINLINE static void direct_backward_head(const BackwardContext& context, const DirectMask& m, Ahead& ahead,
                                                   int hq, int h, bool new_keys, float* scratch) {
  const AttentionBackwardParams& p = *context.params;
  const int D = p.head_dim, Dv = p.head_dim_v, ld = direct_stride(D), ldv = direct_stride(Dv);
  float *query = scratch, *key = query + kDirect * ld, *value = key + kDirect * ld, *dout = value + kDirect * ldv,
        *dkey = dout + kDirect * ldv, *dvalue = dkey + kDirect * ld;
  copy_rows(query, at<const T>(p.query, m.r0, hq), p.query.row_stride, m.rows, D);
  copy_rows(dout, at<const T>(p.dout, m.r0, hq), p.dout.row_stride, m.rows, Dv);
  if (new_keys) {
    copy_rows(key, at<const T>(p.key, m.k0, h), p.key.row_stride, m.keys, D);
    copy_rows(value, at<const T>(p.value, m.k0, h), p.value.row_stride, m.keys, Dv);
  }
  // probabilities; gradients of the probabilities, then of the scores; the scores' derivative
  alignas(64) float z[kDirect * (kDirect + 1)], y[kDirect * (kDirect + 1)], t[kDirect * kDirect];
  direct_dots(m, z, query, key, D, ahead);
  direct_dots(m, y, dout, value, Dv, ahead);
  alignas(64) float lse[kDirect] = {}, dlse[kDirect] = {}, deltas[kDirect];
  __builtin_memcpy(lse, p.lse + hq * p.total_q + m.r0, m.rows * sizeof(float));
  if (p.dlse) __builtin_memcpy(dlse, p.dlse + hq * p.total_q + m.r0, m.rows * sizeof(float));
  const bool capped = p.softcap > 0.f;
  const vf scale = vset(p.scale), factor = vset(capped ? p.scale / p.softcap : p.scale), cap = vset(p.softcap);
  for (int i = 0; i < m.rows; i += VW) {
    const vf lo = vload(m.lo + i), hi = vload(m.hi + i), l = vload(lse + i);
    vf delta = vsub(vzero(), vload(dlse + i));
    for (int j = 0; j < m.keys; j++) {
      const int at = j * kDirect + i;
      vf s = vload(z + at);
      if (capped) {
        const vf x = vtanh(vmul(s, factor));
        vstore(t + at, vsub(vset(1.f), vmul(x, x)));
        s = vfma(x, cap, vsub(vzero(), l));
      } else {
        s = vfma(s, scale, vsub(vzero(), l));
      }
      const vf e = vprobability(s);
      vstore(z + at, e);
      delta = vadd(delta, vkeep(vmul(e, vload(y + at)), vset(static_cast<float>(j)), lo, hi, vzero()));
    }
    for (int j = 0; j < m.keys; j++) {
      const int at = j * kDirect + i;
      vf s = vmul(vmul(scale, vload(z + at)), vsub(vload(y + at), delta));
      if (capped) s = vmul(s, vload(t + at));
      vstore(y + at, s);
    }
    vstore(deltas + i, delta);
  }
  if (p.sinks) __builtin_memcpy(context.delta + hq * p.total_q + m.r0, deltas, m.rows * sizeof(float));

  const int group = p.heads_q / p.heads_k;
  if (group == 1) {
    Combine<T, kDirect, 1>{
        at<T>(p.dvalue, m.k0, h), p.dvalue.row_stride, dout, z, m.row_begin, m.row_end, Dv, false, context.stream_dvalue, ahead}
        .run(m.keys);
    Combine<T, kDirect, 1>{
        at<T>(p.dkey, m.k0, h), p.dkey.row_stride, query, y, m.row_begin, m.row_end, D, false, context.stream_dkey, ahead}
        .run(m.keys);
  } else {
    Combine<float, kDirect, 1>{dvalue, ldv, dout, z, m.row_begin, m.row_end, Dv, !new_keys, false, ahead}.run(m.keys);
    Combine<float, kDirect, 1>{dkey, ld, query, y, m.row_begin, m.row_end, D, !new_keys, false, ahead}.run(m.keys);
  }
  Combine<T, 1, kDirect>{at<T>(p.dquery, m.r0, hq), p.dquery.row_stride, key, y, m.key_begin, m.key_end, D, false, context.stream_dquery,
                         ahead}
      .run(m.rows);
  if (group == 1 || (hq + 1) % group != 0) return;
  for (int j = 0; j < m.keys; j++) {
    T *dk = at<T>(p.dkey, m.k0 + j, h), *dv = at<T>(p.dvalue, m.k0 + j, h);
    for (int d = 0; d < D; d += VW) store_tail(dk + d, load_tail(dkey + j * ld + d, D - d), D - d);
    for (int d = 0; d < Dv; d += VW) store_tail(dv + d, load_tail(dvalue + j * ldv + d, Dv - d), Dv - d);
  }
}

// Prefetches the next document's rows (of out: to write) over the heads of this one.
template <class T>
PACKATTN_INLINE void direct_prefetch(Ahead& ahead, const AttentionForwardParams& p, const Segment* segments,
                                     const Run* runs, const Item* next, const TensorView* dout, bool out,
                                     int products) {
  if (next == nullptr || !is_direct(segments[next->segment], runs)) return;
  const Segment& s = segments[next->segment];
  const Run& run = runs[s.run0];
  const int rows = run.q1 - run.q0, keys = s.k1 - s.k0;
  prefetch_heads<const T>(ahead, p.query, run.q0, rows, p.heads_q, p.head_dim);
  prefetch_heads<const T>(ahead, p.key, s.k0, keys, p.heads_k, p.head_dim);
  prefetch_heads<const T>(ahead, p.value, s.k0, keys, p.heads_k, p.head_dim_v);
  if (dout) {
    prefetch_heads<const T>(ahead, *dout, run.q0, rows, p.heads_q, p.head_dim_v);
  } else if (out) {
    prefetch_heads<T>(ahead, p.out, run.q0, rows, p.heads_q, p.head_dim_v, true);
  }
  ahead.spread(p.heads_q * products * (p.head_dim + p.head_dim_v) / NR);
}

// all heads of one short document
template <class T>
PACKATTN_NOINLINE static void direct_forward(const ForwardContext& context, const Item& it, const Item* next,
                                             float* scratch) {
  const AttentionForwardParams& p = *context.params;
  const Segment& s = context.segments[it.segment];
  const DirectMask m(p, s, context.runs[s.run0]);
  Ahead ahead;
  direct_prefetch<T>(ahead, p, context.segments, context.runs, next, nullptr, !context.stream_out, 1);
  const int group = p.heads_q / p.heads_k;
  for (int hq = 0; hq < p.heads_q; hq++)
    direct_forward_head<T>(p, m, ahead, hq, hq / group, hq % group == 0, context.stream_out, scratch);
}

template <class T>
PACKATTN_NOINLINE static void direct_backward(const BackwardContext& context, const Item& it, const Item* next,
                                              float* scratch) {
  const AttentionBackwardParams& p = *context.params;
  const Segment& s = context.segments[it.segment];
  const DirectMask m(p, s, context.runs[s.run0]);
  Ahead ahead;
  direct_prefetch<T>(ahead, p, context.segments, context.runs, next, &p.dout, false, 3);
  const int group = p.heads_q / p.heads_k;
  for (int hq = 0; hq < p.heads_q; hq++)
    direct_backward_head<T>(context, m, ahead, hq, hq / group, hq % group == 0, scratch);
  if (context.stream_dquery || context.stream_dkey || context.stream_dvalue) vfence();
}

}  // namespace packattn::cpu::PACKATTN_ISA
