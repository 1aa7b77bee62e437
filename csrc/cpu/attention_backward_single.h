// The backward of a document of one key tile and one block of rows, as most packed documents are. All of P and of
// dP = dO V^T is there before dS is needed, so delta is sum(P * dP) and out need not be read; every gradient is one
// product, stored where it belongs without a sum in memory between. Included by the file of each instruction set.
#pragma once
#include "attention_backward_tiles.h"

namespace packattn::cpu::PACKATTN_ISA {

// P = exp(score - lse) and dP of rows x panel, both 0 where masked; delta += sum(P * dP), lane by lane
template <int M>
PACKATTN_NOINLINE static void single_scores_tile(const BackwardScratch& w, const Group& g, Ahead& ahead, int rows,
                                                 int panel, int D, int Dv, bool masked, float scale, float softcap) {
  ahead.step(kScoreSteps / 2);
  float *P = w.P + g.m * LDS + panel * NR, *dP = w.dS + g.m * LDS + panel * NR;
  {
    Acc<M> c;
    tile_dot<M>(c, w.Q + g.m * NR, static_cast<int64_t>(rows) * NR, w.Kt + static_cast<int64_t>(panel) * D * NR, D);
    vf factor = vset(scale);
    if (softcap > 0.f) {
      acc_store(c, P, LDS);
      cap_scores_backward(P, w.slope + g.m * LDS + panel * NR, M, softcap, scale);
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
  ahead.step(kScoreSteps / 2);
  Acc<M> c;
  tile_dot<M>(c, w.dO + g.m * NR, static_cast<int64_t>(rows) * NR, w.Vt + static_cast<int64_t>(panel) * Dv * NR, Dv);
  if (masked) acc_keep(c, panel * NR, w.lo + g.m, w.hi + g.m, vzero());
  acc_store(c, dP, LDS);
  float* delta = w.delta + g.m * VW;
  PACKATTN_UNROLL for (int i = 0; i < M; i++) {
    vf x = vload(delta + i * VW);
    PACKATTN_UNROLL for (int n = 0; n < NV; n++) x = vfma(vload(P + i * LDS + n * VW), c.v[i][n], x);
    vstore(delta + i * VW, x);
  }
}

// to (M rows x `columns`, ld apart) = sum_{k0 <= k < k1} a[i * AI + k * AK] * b[k * NR + j], added to what is there if
// `add`
template <class To, int AI, int AK>
struct Product {
  To* to;
  int64_t ld;
  bool add, stream;

  template <int M>
  PACKATTN_NOINLINE void tile(int row, int column, int columns, const float* a, const float* b, int k0, int k1) const {
    Acc<M> x;
    acc_zero(x);
    tile_acc<M, AI, AK>(x, a, b, k0, k1);
    To* t = to + row * ld + column;
    const int left = columns - column;
    if (add) {
      PACKATTN_UNROLL for (int i = 0; i < M; i++)
        PACKATTN_UNROLL for (int n = 0; n < NV; n++)
            x.v[i][n] = vadd(load_tail(t + i * ld + n * VW, left - n * VW), x.v[i][n]);
    }
    if (left >= NR && !(stream && sizeof(To) == sizeof(float))) {
      PACKATTN_UNROLL for (int i = 0; i < M; i++)
        PACKATTN_UNROLL for (int n = 0; n < NV; n++) vstore(t + i * ld + n * VW, x.v[i][n]);
    } else {
      PACKATTN_UNROLL for (int i = 0; i < M; i++)
        PACKATTN_UNROLL for (int n = 0; n < NV; n++) store_out(t + i * ld + n * VW, x.v[i][n], left - n * VW, stream);
    }
  }
  void block(int n, int row, int column, int columns, const float* a, const float* b, int k0, int k1) const {
    PACKATTN_BY_ROWS(n, tile, row, column, columns, a, b, k0, k1);
  }
};

// One kv head of one document.
template <class T>
struct SingleTile {
  const BackwardContext& context;
  const BackwardScratch& w;
  const Segment& segment;
  const AttentionBackwardParams& p = *context.params;
  const int D = p.head_dim, Dv = p.head_dim_v, Dp = padded_dim(D), Dvp = padded_dim(Dv);
  const int heads_per_key = p.heads_q / p.heads_k;
  const int tile = key_tile(p);
  const int t0 = segment.k0, N = segment.k1 - t0, panels = ceil_div(N, NR);
  const int r0 = context.runs[segment.run0].q0, rows = context.runs[segment.run0].q1 - r0;
  struct Divided {
    int row_groups, key_groups, steps;
  };
  Divided divide() const {
    Divided d{0, 0, 0};
    for (int i = 0; i < rows; i++) {
      w.lo[i] = static_cast<float>(p.key_begin[r0 + i] - t0);
      w.hi[i] = static_cast<float>(p.key_end[r0 + i] - t0);
    }
    even_groups(rows, [&](int m, int n) {
      const int first = r0 + m, last = first + n - 1;
      const Group g{m, n, p.key_begin[first], p.key_begin[last], p.key_end[first], p.key_end[last], false};
      w.groups[d.row_groups++] = g;
      d.steps += kScoreSteps * (ceil_div(g.hi1 - t0, NR) - (g.lo0 - t0) / NR);
    });
    even_groups(N, [&](int j, int n) {
      int32_t* keys = w.keys + 4 * d.key_groups++;
      keys[0] = j;
      keys[1] = n;
      rows_of_keys(p, r0, rows, t0, j, n, keys[2], keys[3]);
    });
    d.steps += (d.key_groups * (Dp + Dvp) + d.row_groups * Dp) / NR;
    return d;
  }

  // P, and dP in place of dS; then dS
  void scores(const Divided& divided, int hq, Ahead& ahead) const {
    const float* lse = p.lse + hq * p.total_q + r0;
    for (int i = 0; i < rows; i++) {
      w.minus_lse[i] = -lse[i];
      vstore(w.delta + i * VW, vzero());
    }
    for (int panel = 0; panel < panels; panel++) {
      const int j0 = t0 + panel * NR, j1 = j0 + NR;
      for (int x = 0; x < divided.row_groups; x++) {
        const Group& g = w.groups[x];
        if (!g.sees(j0, j1)) {  // a key group that straddles the panel's edge reads zeros
          for (int i = 0; i < g.n; i++)
            for (int c = 0; c < NR; c += VW) {
              vstore(w.P + (g.m + i) * LDS + panel * NR + c, vzero());
              vstore(w.dS + (g.m + i) * LDS + panel * NR + c, vzero());
            }
          continue;
        }
        PACKATTN_BY_ROWS(g.n, single_scores_tile, w, g, ahead, rows, panel, D, Dv, g.needs_mask(j0, j1), p.scale, p.softcap);
      }
    }
    const float* dlse = p.dlse ? p.dlse + hq * p.total_q + r0 : nullptr;
    for (int x = 0; x < divided.row_groups; x++) {
      const Group& g = w.groups[x];
      const int c0 = (g.lo0 - t0) / NR * NR, c1 = round_up(g.hi1 - t0, NR);
      for (int m = g.m; m < g.m + g.n; m++) {
        const float delta = vhsum(vload(w.delta + m * VW)) - (dlse ? dlse[m] : 0.f);
        if (p.sinks) context.delta[hq * p.total_q + r0 + m] = delta;
        score_gradients(m, c0, c1, delta);
      }
    }
  }

  // dS = scale * P * (dP - delta) for one row, 0 where masked (delta may be no number)
  void score_gradients(int m, int c0, int c1, float delta) const {
    const vf scale = vset(p.scale), d = vset(delta), lo = vset(w.lo[m]), hi = vset(w.hi[m]);
    const float *P = w.P + m * LDS, *slope = p.softcap > 0.f ? w.slope + m * LDS : nullptr;
    float* dS = w.dS + m * LDS;
    for (int c = c0; c < c1; c += VW) {
      const vf factor = slope ? vload(slope + c) : scale;
      const vf x = vmul(vmul(vload(P + c), vsub(vload(dS + c), d)), factor);
      vstore(dS + c, vkeep(x, vadd(viota(), vset(static_cast<float>(c))), lo, hi, vzero()));
    }
  }

  // scores^T from
  template <class To>
  void key_gradient(const Divided& divided, const Product<To, 1, LDS>& product, const float* scores, const float* from,
                    int columns, bool finite, Ahead& ahead) const {
    for (int c = 0; c < columns; c += NR) {
      const float* b = from + static_cast<int64_t>(c) * rows;
      for (int x = 0; x < divided.key_groups; x++) {
        const int32_t* keys = w.keys + 4 * x;
        const int j = keys[0], n = keys[1];
        ahead.step();
        if (finite) {
          product.block(n, j, c, columns, scores + j, b, keys[2], keys[3]);
        } else {  // 0 * NaN is NaN: a key may meet the rows that see it, no other
          for (int k = j; k < j + n; k++) {
            int i0, i1;
            rows_of_keys(p, r0, rows, t0, k, 1, i0, i1);
            product.block(1, k, c, columns, scores + k, b, i0, i1);
          }
        }
      }
    }
  }

  void query_gradient(const Divided& divided, int hq, bool finite, Ahead& ahead) const {
    const Product<T, LDS, 1> product{at<T>(p.dquery, r0, hq), p.dquery.row_stride, false, context.stream_dquery};
    for (int c = 0; c < D; c += NR) {
      const float* b = w.K + static_cast<int64_t>(c) * tile;
      for (int x = 0; x < divided.row_groups; x++) {
        const Group& g = w.groups[x];
        ahead.step();
        if (finite) {
          product.block(g.n, g.m, c, D, w.dS + g.m * LDS, b, g.lo0 - t0, g.hi1 - t0);
        } else {
          for (int m = g.m; m < g.m + g.n; m++) {
            product.block(1, m, c, D, w.dS + m * LDS, b, p.key_begin[r0 + m] - t0, p.key_end[r0 + m] - t0);
          }
        }
      }
    }
  }

  void run(int h, const Next& next) const {
    const bool finite_k = pack_rows<true>(w.K, static_cast<int64_t>(tile) * NR, at<const T>(p.key, t0, h),
                                          p.key.row_stride, N, D, 1.f);
    // K is transposed from its copy, whose rows share no cache set
    for (int c = 0; c < D; c += NR) {
      pack_cols(w.Kt + c * NR, static_cast<int64_t>(D) * NR, w.K + static_cast<int64_t>(c) * tile, NR, N,
                imin(NR, D - c));
    }
    pack_cols(w.Vt, static_cast<int64_t>(Dv) * NR, at<const T>(p.value, t0, h), p.value.row_stride, N, Dv);
    const Divided divided = divide();
    for (int g = 0; g < heads_per_key; g++) {
      const int hq = h * heads_per_key + g;
      const int64_t panel = static_cast<int64_t>(rows) * NR;
      const bool finite_q = pack_rows<true>(w.Q, panel, at<const T>(p.query, r0, hq), p.query.row_stride, rows, D, 1.f);
      const bool finite_do = pack_rows<true>(w.dO, panel, at<const T>(p.dout, r0, hq), p.dout.row_stride, rows, Dv, 1.f);
      Ahead ahead;
      if (g + 1 < heads_per_key) {
        prefetch_rows<T>(ahead, p, r0, rows, hq + 1, false);
      } else {
        prefetch_next<T>(ahead, context, next);
      }
      ahead.spread(divided.steps);
      scores(divided, hq, ahead);
      if (heads_per_key == 1) {
        key_gradient<T>(divided, {at<T>(p.dvalue, t0, h), p.dvalue.row_stride, false, context.stream_dvalue}, w.P, w.dO,
                        Dv, finite_do, ahead);
        key_gradient<T>(divided, {at<T>(p.dkey, t0, h), p.dkey.row_stride, false, context.stream_dkey}, w.dS, w.Q, D,
                        finite_q, ahead);
      } else {
        key_gradient<float>(divided, {w.dV, Dvp, g > 0, false}, w.P, w.dO, Dv, finite_do, ahead);
        key_gradient<float>(divided, {w.dK, Dp, g > 0, false}, w.dS, w.Q, D, finite_q, ahead);
      }
      query_gradient(divided, hq, finite_k, ahead);
    }
    if (heads_per_key == 1) return;
    for (int j = 0; j < N; j++) {
      T *dk = at<T>(p.dkey, t0 + j, h), *dv = at<T>(p.dvalue, t0 + j, h);
      for (int d = 0; d < D; d += VW) store_out(dk + d, load_tail(w.dK + j * Dp + d, D - d), D - d, context.stream_dkey);
      for (int d = 0; d < Dv; d += VW)
        store_out(dv + d, load_tail(w.dV + j * Dvp + d, Dv - d), Dv - d, context.stream_dvalue);
    }
  }
};

}  // namespace packattn::cpu::PACKATTN_ISA
