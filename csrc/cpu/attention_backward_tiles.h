// What the two backward paths share: a worker's scratch, the register tiles and the prefetch.
// Included by the file of each instruction set, after attention_forward.h.
#pragma once
#include "attention_forward.h"

namespace packattn::cpu::PACKATTN_ISA {

// Prefetch steps of a tile of scores, which is two products over all of a head; those of the gradients count one.
constexpr int kScoreSteps = 4;

struct BackwardScratch {
  float *Q, *dO;       // [D/NR], [Dv/NR] panels of block rows
  float *P, *dS;       // [block][LDS]
  float* minus_lse;    // [block]
  float *lo, *hi;      // [block] key range relative to the tile
  float* dQ;           // [block][Dp] for 16-bit types and blocks of one tile
  float* slope;        // [block][LDS] single tiles: the derivative of the soft cap
  float* delta;        // [block][VW] single tiles: delta, per lane
  float *Kt, *Vt, *K;  // the key tile: cols, cols, rows
  float *dK, *dV;      // its gradients: rows
  Group* groups;       // [block]
  int32_t* keys;       // [tile][4] key groups: first key, keys, first row, last row + 1
  size_t floats;

  BackwardScratch(const AttentionForwardParams& p, float* base) {
    const size_t D = p.head_dim, Dv = p.head_dim_v, Dp = padded_dim(p.head_dim), Dvp = padded_dim(p.head_dim_v);
    const size_t rows = backward_rows(p), N = key_tile(p);
    Carve c{base};
    Q = c.take(rows * Dp);
    dO = c.take(rows * Dvp);
    P = c.take(rows * LDS);
    dS = c.take(rows * LDS);
    minus_lse = c.take(rows);
    lo = c.take(rows);
    hi = c.take(rows);
    dQ = c.take(rows * Dp);
    slope = c.take(p.softcap > 0.f ? rows * LDS : 0);
    delta = c.take(rows * VW);
    Kt = c.take(N * D);
    Vt = c.take(N * Dv);
    K = c.take(N * Dp);
    dK = c.take(N * Dp);
    dV = c.take(N * Dvp);
    groups = reinterpret_cast<Group*>(c.take(rows * sizeof(Group) / sizeof(float)));
    keys = reinterpret_cast<int32_t*>(c.take(N * 4));
    const size_t direct = static_cast<size_t>(kDirect) * 3 * (direct_stride(p.head_dim) + direct_stride(p.head_dim_v));
    floats = c.used > direct ? c.used : direct;
  }
};

// score -> softcap * tanh(score / softcap) in P, and its derivative times `scale` in dS, for M rows of one panel
PACKATTN_NOINLINE static void cap_scores_backward(float* s, float* derivative, int rows, float softcap, float scale) {
  const vf factor = vset(scale / softcap), c = vset(softcap), sc = vset(scale);
  for (int i = 0; i < rows; i++)
    for (int n = 0; n < NR; n += VW) {
      const vf t = vtanh(vmul(vload(s + i * LDS + n), factor));
      vstore(s + i * LDS + n, vmul(t, c));
      vstore(derivative + i * LDS + n, vmul(sc, vsub(vset(1.f), vmul(t, t))));
    }
}

// P and dS of rows x panel: P = exp(score - lse), dS = scale * P * (dO V^T - delta), both 0 where masked
template <int M>
PACKATTN_NOINLINE static void prob_tile(const BackwardScratch& w, const Group& g, int rows, int panel, int D, int Dv,
                                        const float* delta, bool masked, float scale, float softcap) {
  float *P = w.P + g.m * LDS + panel * NR, *dS = w.dS + g.m * LDS + panel * NR;
  {
    Acc<M> c;
    tile_dot<M>(c, w.Q + g.m * NR, static_cast<int64_t>(rows) * NR, w.Kt + static_cast<int64_t>(panel) * D * NR, D);
    vf factor = vset(scale);
    if (softcap > 0.f) {
      acc_store(c, P, LDS);
      cap_scores_backward(P, dS, M, softcap, scale);
      acc_load(c, P, LDS);
      factor = vset(1.f);
    }
    PACKATTN_UNROLL for (int i = 0; i < M; i++) {
      const vf nl = vbcast(w.minus_lse + g.m + i);
      PACKATTN_UNROLL for (int n = 0; n < NV; n++) c.v[i][n] = vprobability(vfma(c.v[i][n], factor, nl));
    }
    if (masked) acc_keep(c, panel * NR, w.lo + g.m, w.hi + g.m, vzero());
    acc_store(c, P, LDS);
  }
  Acc<M> c;
  tile_dot<M>(c, w.dO + g.m * NR, static_cast<int64_t>(rows) * NR, w.Vt + static_cast<int64_t>(panel) * Dv * NR, Dv);
  PACKATTN_UNROLL for (int i = 0; i < M; i++) {
    const vf dl = vbcast(delta + g.m + i);
    PACKATTN_UNROLL for (int n = 0; n < NV; n++)
        c.v[i][n] = vmul(vload(P + i * LDS + n * VW), vsub(c.v[i][n], dl));
  }
  if (softcap > 0.f) {
    PACKATTN_UNROLL for (int i = 0; i < M; i++)
      PACKATTN_UNROLL for (int n = 0; n < NV; n++) c.v[i][n] = vmul(c.v[i][n], vload(dS + i * LDS + n * VW));
  } else {
    const vf s = vset(scale);
    PACKATTN_UNROLL for (int i = 0; i < M; i++)
      PACKATTN_UNROLL for (int n = 0; n < NV; n++) c.v[i][n] = vmul(c.v[i][n], s);
  }
  if (masked) acc_keep(c, panel * NR, w.lo + g.m, w.hi + g.m, vzero());
  acc_store(c, dS, LDS);
}

// c (M keys x NR, contiguous) += A^T B over the rows [r0, r1); A: P or dS from the keys' first column
template <int M>
PACKATTN_NOINLINE static void key_gradient_tile(float* c, const float* a, const float* b, int r0, int r1) {
  Acc<M> x;
  acc_zero(x);
  tile_acc<M, 1, LDS>(x, a, b, r0, r1);
  PACKATTN_UNROLL for (int i = 0; i < M; i++)
    PACKATTN_UNROLL for (int n = 0; n < NV; n++) x.v[i][n] = vadd(vload(c + i * NR + n * VW), x.v[i][n]);
  acc_store(x, c, NR);
}

// c (M rows x `columns`, ld apart) = or += dS K over the keys [k0, k1)
template <int M>
PACKATTN_NOINLINE static void query_gradient_tile(float* c, int64_t ld, int columns, bool add, const float* a,
                                                  const float* b, int k0, int k1) {
  Acc<M> x;
  acc_zero(x);
  tile_acc<M, LDS, 1>(x, a, b, k0, k1);
  if (add) {
    PACKATTN_UNROLL for (int i = 0; i < M; i++)
      PACKATTN_UNROLL for (int n = 0; n < NV; n++)
          x.v[i][n] = vadd(load_tail(c + i * ld + n * VW, columns - n * VW), x.v[i][n]);
  }
  if (columns >= NR) {
    acc_store(x, c, ld);
  } else {
    PACKATTN_UNROLL for (int i = 0; i < M; i++)
      PACKATTN_UNROLL for (int n = 0; n < NV; n++) store_tail(c + i * ld + n * VW, x.v[i][n], columns - n * VW);
  }
}

// first index in [from, to) of a nondecreasing array whose value exceeds x
PACKATTN_INLINE int first_above(const int32_t* values, int from, int to, int64_t x) {
  while (from < to) {
    const int middle = from + (to - from) / 2;
    if (values[middle] > x) {
      to = middle;
    } else {
      from = middle + 1;
    }
  }
  return from;
}

// Rows of the block [r0, r0 + rows), counted from its first, that see one of the keys [j, j + n) of the tile at t0.
PACKATTN_INLINE void rows_of_keys(const AttentionForwardParams& p, int r0, int rows, int t0, int j, int n, int& i0,
                                  int& i1) {
  i0 = first_above(p.key_end, r0, r0 + rows, t0 + j) - r0;
  i1 = first_above(p.key_begin, r0 + i0, r0 + rows, static_cast<int64_t>(t0) + j + n - 1) - r0;
}

template <class T>
PACKATTN_INLINE void prefetch_rows(Ahead& ahead, const AttentionBackwardParams& p, int r, int rows, int hq, bool out) {
  ahead.add(at<const T>(p.query, r, hq), p.query.row_stride, rows, p.head_dim);
  ahead.add(at<const T>(p.dout, r, hq), p.dout.row_stride, rows, p.head_dim_v);
  if (out) ahead.add(at<const T>(p.out, r, hq), p.out.row_stride, rows, p.head_dim_v);
}
template <class T>
PACKATTN_INLINE void prefetch_keys(Ahead& ahead, const AttentionBackwardParams& p, int k, int keys, int h) {
  ahead.add(at<const T>(p.key, k, h), p.key.row_stride, keys, p.head_dim);
  ahead.add(at<const T>(p.value, k, h), p.value.row_stride, keys, p.head_dim_v);
}
// what the next item and kv head read first
template <class T>
PACKATTN_NOINLINE static void prefetch_next(Ahead& ahead, const BackwardContext& context, const Next& next) {
  if (next.kv_head < 0) return;
  const AttentionBackwardParams& p = *context.params;
  const Segment& s = context.segments[next.item->segment];
  const int tile = key_tile(p), k = s.k0 + (next.item->b - 1) * tile, r = context.runs[s.run0].q0;
  prefetch_keys<T>(ahead, p, k, imin(tile, s.k1 - k), next.kv_head);
  if (next.item->turns < 0) {
    prefetch_rows<T>(ahead, p, r, imin(backward_rows(p), context.runs[s.run0].q1 - r),
                     next.kv_head * (p.heads_q / p.heads_k), !is_single(p, s, context.runs));
  }
}

}  // namespace packattn::cpu::PACKATTN_ISA
