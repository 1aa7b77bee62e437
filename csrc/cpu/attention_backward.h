// The backward: one pass over the scores with five products. An item owns dkey and dvalue of a tile of keys (or of
// all tiles of a short segment) and adds to dquery. Where several workers share a segment, they add to a block of
// query rows in the fixed order of the key tiles, highest first: a counter per block says whose turn it is. Under a
// causal mask the higher tiles start later rows, so nobody waits to begin with; and as tiles are taken in that order
// a worker only ever waits for one that is already running. Bits do not depend on who shares what.
// Included by the file of each instruction set, after attention_forward.h.
#pragma once
#include "attention_backward_single.h"
#include "attention_backward_tiles.h"

namespace packattn::cpu::PACKATTN_ISA {

template <class T>
struct Backward {
  const BackwardContext& context;
  const AttentionBackwardParams& p = *context.params;
  const int D = p.head_dim, Dv = p.head_dim_v, Dp = padded_dim(D), Dvp = padded_dim(Dv);
  const int heads_per_key = p.heads_q / p.heads_k;
  const int tile = key_tile(p);
  static constexpr bool kInPlace = sizeof(T) == sizeof(float);  // dquery itself is the accumulator

  void delta_rows(int r0, int r1, int hq) const {
    float* delta = context.delta + hq * p.total_q;
    const float* dlse = p.dlse ? p.dlse + hq * p.total_q : nullptr;
    for (int r = r0; r < r1; r++) {
      const T *out = at<const T>(p.out, r, hq), *dout = at<const T>(p.dout, r, hq);
      vf s = vzero();
      for (int d = 0; d < Dv; d += VW) s = vfma(load_tail(out + d, Dv - d), load_tail(dout + d, Dv - d), s);
      delta[r] = vhsum(s) - (dlse ? dlse[r] : 0.f);
    }
  }

  // One row block (rows [b0, b1), of which [i0, i1) see the tile) of one query head against one key tile.
  struct Block {
    int b0, b1, i0, i1, hq;
    bool first, last;  // of the tiles that see the block, in the order of the additions
    int32_t* turn;     // nullptr: nobody else adds to it
    float* dq;         // row b0 of the accumulator, ld floats between rows
    int64_t ld;
  };

  void block(const BackwardScratch& w, const Block& b, Ahead& ahead, int t, int t0, int N, bool finite_keys) const {
    const int r0 = b.i0, rows = b.i1 - b.i0, panels = ceil_div(N, NR);
    const bool finite_q = pack_rows<true>(w.Q, static_cast<int64_t>(rows) * NR, at<const T>(p.query, r0, b.hq),
                                          p.query.row_stride, rows, D, 1.f);
    const bool finite_do = pack_rows<true>(w.dO, static_cast<int64_t>(rows) * NR, at<const T>(p.dout, r0, b.hq),
                                           p.dout.row_stride, rows, Dv, 1.f);
    const float *delta = context.delta + b.hq * p.total_q + r0, *lse = p.lse + b.hq * p.total_q + r0;
    for (int i = 0; i < rows; i++) {
      w.lo[i] = static_cast<float>(p.key_begin[r0 + i] - t0);
      w.hi[i] = static_cast<float>(p.key_end[r0 + i] - t0);
      w.minus_lse[i] = -lse[i];
    }
    Group* groups = w.groups;
    int count = 0;
    even_groups(rows, [&](int m, int n) {
      const int first = r0 + m, last = first + n - 1;
      groups[count++] = {m, n, p.key_begin[first], p.key_begin[last], p.key_end[first], p.key_end[last], false};
    });
    for (int panel = 0; panel < panels; panel++) {
      const int j0 = t0 + panel * NR, j1 = j0 + NR;
      for (int x = 0; x < count; x++) {
        const Group& g = groups[x];
        if (!g.sees(j0, j1)) {  // a key group that straddles the panel's edge reads zeros
          for (int i = 0; i < g.n; i++)
            for (int c = 0; c < NR; c += VW) {
              vstore(w.P + (g.m + i) * LDS + panel * NR + c, vzero());
              vstore(w.dS + (g.m + i) * LDS + panel * NR + c, vzero());
            }
          continue;
        }
        ahead.step(kScoreSteps);
        PACKATTN_BY_ROWS(g.n, prob_tile, w, g, rows, panel, D, Dv, delta, g.needs_mask(j0, j1), p.scale, p.softcap);
      }
    }
    key_gradients(w, ahead, r0, rows, t0, N, finite_q, finite_do);
    query_gradient(w, b, ahead, count, t, t0, N, finite_keys);
  }

  void key_gradients(const BackwardScratch& w, Ahead& ahead, int r0, int rows, int t0, int N, bool finite_q,
                     bool finite_do) const {
    int count = 0;
    int32_t* keys = w.keys;
    even_groups(N, [&](int j, int n) {
      int i0, i1;
      rows_of_keys(p, r0, rows, t0, j, n, i0, i1);
      if (i1 <= i0) return;
      keys[count * 4] = j;
      keys[count * 4 + 1] = n;
      keys[count * 4 + 2] = i0;
      keys[count * 4 + 3] = i1;
      count++;
    });
    const auto product = [&](float* to, const float* scores, const float* from, int panels, bool finite) {
      for (int panel = 0; panel < panels; panel++)
        for (int x = 0; x < count; x++) {
          const int j = keys[x * 4], n = keys[x * 4 + 1], i0 = keys[x * 4 + 2], i1 = keys[x * 4 + 3];
          const float* b = from + static_cast<int64_t>(panel) * rows * NR;
          float* c = to + (static_cast<int64_t>(panel) * tile + j) * NR;
          ahead.step();
          if (finite) {
            PACKATTN_BY_ROWS(n, key_gradient_tile, c, scores + j, b, i0, i1);
          } else {  // 0 * NaN is NaN: a key may meet the rows that see it, no other
            for (int k = 0; k < n; k++) {
              int a0, a1;
              rows_of_keys(p, r0, rows, t0, j + k, 1, a0, a1);
              if (a1 > a0) key_gradient_tile<1>(c + k * NR, scores + j + k, b, a0, a1);
            }
          }
        }
    };
    product(w.dV, w.P, w.dO, Dvp / NR, finite_do);
    product(w.dK, w.dS, w.Q, Dp / NR, finite_q);
  }

  void query_gradient(const BackwardScratch& w, const Block& b, Ahead& ahead, int count, int t, int t0, int N,
                      bool finite_keys) const {
    if (b.turn && !b.first) context.wait_for_turn(b.turn, t);
    if (b.first) {
      for (int r = b.b0; r < b.i0; r++) __builtin_memset(b.dq + (r - b.b0) * b.ld, 0, D * sizeof(float));
      for (int r = b.i1; r < b.b1; r++) __builtin_memset(b.dq + (r - b.b0) * b.ld, 0, D * sizeof(float));
    }
    float* dq = b.dq + (b.i0 - b.b0) * b.ld;
    for (int panel = 0; panel < Dp / NR; panel++)
      for (int x = 0; x < count; x++) {
        const Group& g = w.groups[x];
        const float *a = w.dS + g.m * LDS, *k = w.K + static_cast<int64_t>(panel) * tile * NR;
        float* c = dq + g.m * b.ld + panel * NR;
        const int columns = D - panel * NR;
        ahead.step();
        if (finite_keys) {
          const int k0 = imax(0, g.lo0 - t0), k1 = imin(N, g.hi1 - t0);
          PACKATTN_BY_ROWS(g.n, query_gradient_tile, c, b.ld, columns, !b.first, a, k, k0, k1);
        } else {
          for (int i = 0; i < g.n; i++) {
            const int r = b.i0 + g.m + i, k0 = imax(0, p.key_begin[r] - t0), k1 = imin(N, p.key_end[r] - t0);
            query_gradient_tile<1>(c + i * b.ld, b.ld, columns, !b.first, a + i * LDS, k, k0, k1);
          }
        }
      }
    if constexpr (!kInPlace) {
      if (b.last) {
        for (int r = b.b0; r < b.b1; r++) {
          T* to = at<T>(p.dquery, r, b.hq);
          const float* from = b.dq + (r - b.b0) * b.ld;
          for (int d = 0; d < D; d += VW) store_tail(to + d, load_tail(from + d, D - d), D - d);
        }
      }
    }
    if (b.turn) __atomic_store_n(b.turn, t - 1, __ATOMIC_RELEASE);
  }

  void store_keys(const BackwardScratch& w, int t0, int N, int h) const {
    for (int j = 0; j < N; j++) {
      T *dk = at<T>(p.dkey, t0 + j, h), *dv = at<T>(p.dvalue, t0 + j, h);
      for (int d = 0; d < D; d += VW)
        store_out(dk + d, vload(w.dK + (static_cast<int64_t>(d / NR) * tile + j) * NR + d % NR), D - d,
                  context.stream_dkey);
      for (int d = 0; d < Dv; d += VW)
        store_out(dv + d, vload(w.dV + (static_cast<int64_t>(d / NR) * tile + j) * NR + d % NR), Dv - d,
                  context.stream_dvalue);
    }
  }

  void key_tile_gradients(const BackwardScratch& w, const Item& it, int t, int h, float* accumulator,
                          const Next& next) const {
    const Segment& s = context.segments[it.segment];
    const int t0 = s.k0 + t * tile, N = imin(tile, s.k1 - t0);
    const int segment_q0 = context.runs[s.run0].q0, segment_rows = context.runs[s.run1 - 1].q1 - segment_q0;
    pack_cols(w.Kt, static_cast<int64_t>(D) * NR, at<const T>(p.key, t0, h), p.key.row_stride, N, D);
    pack_cols(w.Vt, static_cast<int64_t>(Dv) * NR, at<const T>(p.value, t0, h), p.value.row_stride, N, Dv);
    const bool finite =
        pack_rows<true>(w.K, static_cast<int64_t>(tile) * NR, at<const T>(p.key, t0, h), p.key.row_stride, N, D, 1.f);
    __builtin_memset(w.dK, 0, static_cast<size_t>(tile) * Dp * sizeof(float));
    __builtin_memset(w.dV, 0, static_cast<size_t>(tile) * Dvp * sizeof(float));
    // the first run that reaches the tile
    int run0 = s.run0, end = s.run1;
    while (run0 < end) {
      const int middle = run0 + (end - run0) / 2;
      if (p.key_end[context.runs[middle].q1 - 1] > t0) {
        end = middle;
      } else {
        run0 = middle + 1;
      }
    }
    for (int g = 0; g < heads_per_key; g++) {
      const int hq = h * heads_per_key + g;
      for (int x = run0; x < s.run1 && p.key_begin[context.runs[x].q0] < t0 + N; x++) {
        const Run& run = context.runs[x];
        const int i0 = first_above(p.key_end, run.q0, run.q1, t0);
        const int i1 = first_above(p.key_begin, i0, run.q1, static_cast<int64_t>(t0) + N - 1);
        for (int r = i0; r < i1;) {
          const int number = (r - run.q0) / run.block_rows;
          Block b;
          b.b0 = run.q0 + number * run.block_rows;
          b.b1 = imin(b.b0 + run.block_rows, run.q1);
          b.i0 = r;
          b.i1 = imin(b.b1, i1);
          b.hq = hq;
          b.first = t == (p.key_end[b.b1 - 1] - 1 - s.k0) / tile;
          b.last = t == (p.key_begin[b.b0] - s.k0) / tile;
          b.turn = nullptr;
          if (it.turns >= 0) {
            b.turn = context.turns + it.turns + static_cast<int64_t>(hq) * s.blocks + run.block0 + number;
          } else if (b.first) {
            delta_rows(b.b0, b.b1, hq);
          }
          if (kInPlace) {
            b.dq = reinterpret_cast<float*>(at<T>(p.dquery, b.b0, hq));
            b.ld = p.dquery.row_stride;
          } else {
            b.ld = Dp;
            b.dq = b.first && b.last
                       ? w.dQ
                       : accumulator + (static_cast<int64_t>(g) * segment_rows + (b.b0 - segment_q0)) * Dp;
          }
          r = b.i1;

          Ahead ahead;
          if (r < i1) {
            prefetch_rows<T>(ahead, p, r, imin(run.block_rows, i1 - r), hq, it.turns < 0);
          } else if (g + 1 < heads_per_key) {
            prefetch_rows<T>(ahead, p, i0, imin(run.block_rows, i1 - i0), hq + 1, it.turns < 0);
          } else if (t > it.a) {
            prefetch_keys<T>(ahead, p, t0 - tile, tile, h);
          } else {
            if (!context.stream_dkey) ahead.add(at<T>(p.dkey, t0, h), p.dkey.row_stride, N, D, true);
            if (!context.stream_dvalue) ahead.add(at<T>(p.dvalue, t0, h), p.dvalue.row_stride, N, Dv, true);
            prefetch_next<T>(ahead, context, next);
          }
          ahead.spread(ceil_div(b.i1 - b.i0, MR) * ceil_div(N, NR) * kScoreSteps / 2 +
                       (ceil_div(N, MR) * (Dp + Dvp) + ceil_div(b.i1 - b.i0, MR) * Dp) / NR);
          block(w, b, ahead, t, t0, N, finite);
        }
      }
    }
    store_keys(w, t0, N, h);
  }

  void run(const Item& it, int h, float* accumulator, const Next& next, float* scratch) const {
    const BackwardScratch w(p, scratch);
    const Segment& s = context.segments[it.segment];
    if (is_single(p, s, context.runs)) {
      SingleTile<T>{context, w, s}.run(h, next);
    } else {
      for (int t = it.b - 1; t >= it.a; t--) key_tile_gradients(w, it, t, h, accumulator, next);
    }
    if (context.stream_dquery || context.stream_dkey || context.stream_dvalue) vfence();
  }
};

static size_t backward_scratch(const AttentionBackwardParams& p) { return BackwardScratch(p, nullptr).floats; }

static void delta(const BackwardContext& context, int32_t r0, int32_t r1) {
  const AttentionBackwardParams& p = *context.params;
  for (int32_t h = 0; h < p.heads_q; h++) {
    switch (p.dtype) {
      case DType::float32: Backward<float>{context}.delta_rows(r0, r1, h); break;
      case DType::bfloat16: Backward<bf16>{context}.delta_rows(r0, r1, h); break;
      case DType::float16: Backward<fp16>{context}.delta_rows(r0, r1, h); break;
      default: __builtin_trap();  // attention.cpp checked it
    }
  }
}

static void backward_direct(const BackwardContext& context, const Item& item, const Item* next, float* scratch) {
  switch (context.params->dtype) {
    case DType::float32: return direct_backward<float>(context, item, next, scratch);
    case DType::bfloat16: return direct_backward<bf16>(context, item, next, scratch);
    case DType::float16: return direct_backward<fp16>(context, item, next, scratch);
    default: __builtin_trap();
  }
}

static void backward(const BackwardContext& context, const Item& item, int32_t kv_head, float* accumulator, Next next,
                     float* scratch) {
  switch (context.params->dtype) {
    case DType::float32: return Backward<float>{context}.run(item, kv_head, accumulator, next, scratch);
    case DType::bfloat16: return Backward<bf16>{context}.run(item, kv_head, accumulator, next, scratch);
    case DType::float16: return Backward<fp16>{context}.run(item, kv_head, accumulator, next, scratch);
    default: __builtin_trap();
  }
}

static double sink_gradient(const BackwardContext& context, const Run* runs, int64_t count, int32_t head) {
  const AttentionBackwardParams& p = *context.params;
  const float *lse = p.lse + head * p.total_q, *delta = context.delta + head * p.total_q;
  const vf sink = vset(p.sinks[head]);
  double total = 0;
  for (int64_t x = 0; x < count; x++) {
    for (int r = runs[x].q0; r < runs[x].q1; r += VW) {
      float probability[VW];
      const int n = imin(VW, runs[x].q1 - r);
      for (int i = 0; i < VW; i++) probability[i] = i < n ? lse[r + i] : 0.f;
      vstore(probability, vprobability(vsub(sink, vload(probability))));
      for (int i = 0; i < n; i++) total -= static_cast<double>(probability[i]) * delta[r + i];
    }
  }
  return total;
}

}  // namespace packattn::cpu::PACKATTN_ISA
