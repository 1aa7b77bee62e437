// The forward. One item is a block of query rows of one kv head, the rows of all query heads of its group stacked:
// they share the packed keys and values. It walks over the key tiles with an online softmax (Milakov and
// Gimelshein 2018; Dao et al. 2022). Included by the file of each instruction set.
#pragma once
#include "attention_direct.h"
#include "attention_kernels.h"
#include "tile.h"

namespace packattn::cpu::PACKATTN_ISA {

constexpr int kMaxTile = 128;       // key_tile() is at most this
constexpr int LDS = kMaxTile + NR;  // row stride of a score block; the padding keeps columns off one cache set

struct ForwardScratch {
  float *Q, *O;          // [D/NR] panels per row group; [Dv/NR] panels of `cap` rows
  float* S;              // [cap][LDS] scores, then probabilities
  float *row_max, *sum;  // [cap][VW] per lane
  float *top, *alpha;    // [cap] running maximum, factor for what O holds so far
  float *lo, *hi;        // [cap] key range relative to the tile
  float *Kt, *V;         // the key tile: cols, rows
  Group* groups;         // [cap]
  int cap;               // row capacity
  size_t floats;

  ForwardScratch(const AttentionForwardParams& p, float* base) {
    const int Dp = padded_dim(p.head_dim), Dvp = padded_dim(p.head_dim_v), N = key_tile(p);
    cap = forward_rows(p);
    Carve c{base};
    Q = c.take(static_cast<size_t>(cap) * Dp);
    O = c.take(static_cast<size_t>(cap) * Dvp);
    S = c.take(static_cast<size_t>(cap) * LDS);
    row_max = c.take(static_cast<size_t>(cap) * VW);
    sum = c.take(static_cast<size_t>(cap) * VW);
    top = c.take(cap);
    alpha = c.take(cap);
    lo = c.take(cap);
    hi = c.take(cap);
    Kt = c.take(static_cast<size_t>(N) * p.head_dim);
    V = c.take(static_cast<size_t>(N) * Dvp);
    groups = reinterpret_cast<Group*>(c.take(static_cast<size_t>(cap) * sizeof(Group) / sizeof(float)));
    const size_t direct = static_cast<size_t>(kDirect) * (2 * direct_stride(p.head_dim) + direct_stride(p.head_dim_v));
    floats = c.used > direct ? c.used : direct;
  }
};

// softcap * tanh(score) of the rows of one panel, in memory: rarely used, so kept out of the tile's code
PACKATTN_NOINLINE static void cap_scores(float* s, int rows, float softcap) {
  const vf c = vset(softcap);
  for (int i = 0; i < rows; i++)
    for (int n = 0; n < NR; n += VW) vstore(s + i * LDS + n, vmul(c, vtanh(vload(s + i * LDS + n))));
}

// scores of rows x panel, masked, and the running maximum per lane
template <int M>
PACKATTN_NOINLINE static void score_tile(const ForwardScratch& w, const Group& g, int panel, int D, int Dp, bool masked,
                                         float softcap) {
  Acc<M> c;
  tile_dot<M>(c, w.Q + g.m * Dp, M * NR, w.Kt + static_cast<int64_t>(panel) * D * NR, D);
  float* s = w.S + g.m * LDS + panel * NR;
  if (softcap > 0.f) {
    acc_store(c, s, LDS);
    cap_scores(s, M, softcap);
    acc_load(c, s, LDS);
  }
  if (masked) acc_keep(c, panel * NR, w.lo + g.m, w.hi + g.m, vset(-kInf));
  acc_store(c, s, LDS);
  float* row_max = w.row_max + g.m * VW;
  PACKATTN_UNROLL for (int i = 0; i < M; i++) {
    vf x = c.v[i][0];
    PACKATTN_UNROLL for (int n = 1; n < NV; n++) x = vmax(x, c.v[i][n]);
    vstore(row_max + i * VW, vmax(vload(row_max + i * VW), x));
  }
}

// scores -> exp(score - running maximum), in place; updates the maximum, the sum and the factor for O
PACKATTN_INLINE void softmax_row(const ForwardScratch& w, int m, int c0, int c1) {
  const float old = w.top[m], seen = vhmax(vload(w.row_max + m * VW)), now = seen > old ? seen : old;
  float a = old == now ? 1.f : 0.f;  // 0: nothing was seen before
  if (old != now && old != -kInf) {
    alignas(64) float lanes[VW];
    vstore(lanes, vexp(vset(old - now)));
    a = lanes[0];
  }
  const vf reference = vset(now == -kInf ? 0.f : now);  // all -inf: exp gives zeros instead of NaN
  vf sum[2] = {vzero(), vzero()};
  float* s = w.S + m * LDS;
  for (int c = c0; c < c1; c += NR) {
    PACKATTN_UNROLL for (int n = 0; n < NV; n++) {
      const vf e = vexp(vsub(vload(s + c + n * VW), reference));
      vstore(s + c + n * VW, e);
      sum[n & 1] = vadd(sum[n & 1], e);
    }
  }
  vstore(w.sum + m * VW, vfma(vload(w.sum + m * VW), vset(a), vadd(sum[0], sum[1])));
  w.top[m] = now;
  w.alpha[m] = a;
}

// O = alpha * O + P V for one panel of V, over the keys [k0, k1) of the tile. m: first row; ldv: rows of V's panels
template <int M>
PACKATTN_NOINLINE static void value_tile(const ForwardScratch& w, int m, bool started, int panel, int ldv, int k0,
                                         int k1) {
  Acc<M> c;
  float* o = w.O + (static_cast<int64_t>(panel) * w.cap + m) * NR;
  acc_zero(c);
  tile_acc<M, LDS, 1>(c, w.S + m * LDS, w.V + static_cast<int64_t>(panel) * ldv * NR, k0, k1);
  if (started) {
    PACKATTN_UNROLL for (int i = 0; i < M; i++) {
      const vf a = vbcast(w.alpha + m + i);
      PACKATTN_UNROLL for (int n = 0; n < NV; n++) c.v[i][n] = vfma(vload(o + i * NR + n * VW), a, c.v[i][n]);
    }
  }
  acc_store(c, o, NR);
}

// The same for a block whose keys are all in one tile: out itself, rows r to r + M of `out`, scaled by 1 / sum
template <class T>
struct OnlyTile {
  const ForwardScratch& w;
  int columns, ldv;  // ldv: rows of V's panels
  int64_t ld_out;
  bool stream;

  template <int M>
  PACKATTN_NOINLINE void tile(T* out, const float* inverse, int m, int panel, int k0, int k1) const {
    Acc<M> c;
    acc_zero(c);
    tile_acc<M, LDS, 1>(c, w.S + m * LDS, w.V + static_cast<int64_t>(panel) * ldv * NR, k0, k1);
    PACKATTN_UNROLL for (int i = 0; i < M; i++) {
      const vf scale = vbcast(inverse + m + i);
      PACKATTN_UNROLL for (int n = 0; n < NV; n++) c.v[i][n] = vmul(scale, c.v[i][n]);
    }
    const int left = columns - panel * NR;
    out += panel * NR;
    PACKATTN_UNROLL for (int i = 0; i < M; i++)
      PACKATTN_UNROLL for (int n = 0; n < NV; n++)
          store_out(out + i * ld_out + n * VW, c.v[i][n], left - n * VW, stream);
  }
  void block(int n, T* out, const float* inverse, int m, int panel, int k0, int k1) const {
    PACKATTN_BY_ROWS(n, tile, out, inverse, m, panel, k0, k1);
  }
};

template <class T>
struct Forward {
  const ForwardContext& context;
  const AttentionForwardParams& p = *context.params;
  const int D = p.head_dim, Dv = p.head_dim_v, Dp = padded_dim(D), Dvp = padded_dim(Dv);
  const int heads_per_key = p.heads_q / p.heads_k;
  const int tile = key_tile(p);

  // What starts the softmax: the sink is a key with value 0.
  void start_rows(const ForwardScratch& w, int rows, int h0, int heads) const {
    for (int g = 0; g < heads; g++) {
      const float sink = p.sinks ? p.sinks[h0 + g] : -kInf;
      for (int m = g * rows; m < (g + 1) * rows; m++) {
        w.top[m] = sink;
        vstore(w.sum + m * VW, vzero());
        w.sum[m * VW] = p.sinks && sink != -kInf ? 1.f : 0.f;
      }
    }
  }

  void prefetch_next(Ahead& ahead, const Next& next, int cap) const {
    if (next.kv_head < 0) return;
    const Item& it = *next.item;
    const int rows = imin(cap, it.b - it.a), k0 = p.key_begin[it.a], keys = imin(tile, p.key_end[it.b - 1] - k0);
    ahead.add(at<const T>(p.query, it.a, next.kv_head * heads_per_key), p.query.row_stride, rows, D);
    ahead.add(at<const T>(p.key, k0, next.kv_head), p.key.row_stride, keys, D);
  }

  // rows [r0, r1) of the query heads [h0, h0 + heads), which all read kv head h
  void block(const ForwardScratch& w, const Segment& segment, int r0, int r1, int h, int h0, int heads,
             const Next& next) const {
    const int rows = r1 - r0, M = rows * heads;
    const float softcap = p.softcap;
    const float scale = softcap > 0.f ? p.scale / softcap : p.scale;
    Group* groups = w.groups;
    int count = 0;
    for (int g = 0; g < heads; g++) {
      even_groups(rows, [&](int m, int n) {
        const int a = r0 + m, b = a + n - 1, at_row = g * rows + m;
        pack_rows<false>(w.Q + at_row * Dp, n * NR, at<const T>(p.query, a, h0 + g), p.query.row_stride, n, D, scale);
        groups[count++] = {at_row, n, p.key_begin[a], p.key_begin[b], p.key_end[a], p.key_end[b], false};
      });
    }
    start_rows(w, rows, h0, heads);

    const int k_end = p.key_end[r1 - 1];
    for (int t0 = segment.k0 + (p.key_begin[r0] - segment.k0) / tile * tile; t0 < k_end; t0 += tile) {
      const int N = imin(tile, k_end - t0), panels = ceil_div(N, NR);
      pack_cols(w.Kt, static_cast<int64_t>(D) * NR, at<const T>(p.key, t0, h), p.key.row_stride, N, D);
      for (int i = 0; i < rows; i++) {
        w.lo[i] = static_cast<float>(p.key_begin[r0 + i] - t0);
        w.hi[i] = static_cast<float>(p.key_end[r0 + i] - t0);
      }
      for (int g = 1; g < heads; g++) {
        __builtin_memcpy(w.lo + g * rows, w.lo, rows * sizeof(float));
        __builtin_memcpy(w.hi + g * rows, w.hi, rows * sizeof(float));
      }
      for (int m = 0; m < M; m++) vstore(w.row_max + m * VW, vset(-kInf));
      Ahead values;
      values.add(at<const T>(p.value, t0, h), p.value.row_stride, N, Dv);
      int scores = 0;  // tiles of them
      for (int x = 0; x < count; x++) {
        const int c0 = imax(0, groups[x].lo0 - t0) / NR, c1 = ceil_div(imax(0, imin(N, groups[x].hi1 - t0)), NR);
        scores += imax(0, c1 - c0);
      }
      values.spread(scores);
      for (int panel = 0; panel < panels; panel++) {
        const int j0 = t0 + panel * NR, j1 = j0 + NR;
        for (int x = 0; x < count; x++) {
          const Group& g = groups[x];
          if (!g.sees(j0, j1)) continue;
          values.step();
          PACKATTN_BY_ROWS(g.n, score_tile, w, g, panel, D, Dp, g.needs_mask(j0, j1), softcap);
        }
      }
      for (int x = 0; x < count; x++) {
        const Group& g = groups[x];
        if (!g.sees(t0, t0 + N)) continue;
        const int c0 = imax(0, g.lo0 - t0) / NR * NR, c1 = round_up(imin(N, g.hi1 - t0), NR);
        for (int i = 0; i < g.n; i++) softmax_row(w, g.m + i, c0, c1);
      }
      // Values are packed and prefetched only now, and the next tile's keys after them: rows of all heads are often a
      // power of two apart, and then few of them fit in their cache sets at a time.
      const bool finite = pack_rows<true>(w.V, static_cast<int64_t>(tile) * NR, at<const T>(p.value, t0, h),
                                          p.value.row_stride, N, Dv, 1.f);
      Ahead ahead;
      if (t0 + tile < k_end) {
        ahead.add(at<const T>(p.key, t0 + tile, h), p.key.row_stride, imin(tile, k_end - t0 - tile), D);
      } else {
        prefetch_next(ahead, next, w.cap);
      }
      ahead.spread(count * (Dvp / NR));
      if (count > 0 && !groups[0].started && t0 + tile >= k_end) {
        only_tile(w, r0, rows, h0, heads, count / heads, t0, finite, ahead);
        return;
      }
      for (int panel = 0; panel < Dvp / NR; panel++)
        for (int x = 0; x < count; x++) {
          const Group& g = groups[x];
          if (!g.sees(t0, t0 + N)) continue;
          ahead.step();
          if (finite) {
            const int c0 = imax(0, g.lo0 - t0), c1 = imin(N, g.hi1 - t0);
            PACKATTN_BY_ROWS(g.n, value_tile, w, g.m, g.started, panel, tile, c0, c1);
          } else {  // 0 * NaN is NaN: a row may meet the keys that it sees, no other
            for (int m = g.m; m < g.m + g.n; m++) {
              const int r = r0 + m % rows, c0 = imax(0, p.key_begin[r] - t0), c1 = imin(N, p.key_end[r] - t0);
              value_tile<1>(w, m, g.started, panel, tile, c0, c1);
            }
          }
        }
      for (int x = 0; x < count; x++)
        if (groups[x].sees(t0, t0 + N)) groups[x].started = true;
    }
    finish_rows(w, r0, rows, h0, heads);
  }

  // The products with V of a block that has only the tile at t0; `count` groups for each head.
  void only_tile(const ForwardScratch& w, int r0, int rows, int h0, int heads, int count, int t0, bool finite,
                 Ahead& ahead) const {
    const float* inverse = finish_sums(w, r0, rows, h0, heads);
    const OnlyTile<T> product{w, Dv, tile, p.out.row_stride, context.stream_out};
    for (int panel = 0; panel < Dvp / NR; panel++)
      for (int g = 0; g < heads; g++) {
        T* out = at<T>(p.out, r0, h0 + g);
        for (int x = g * count; x < (g + 1) * count; x++) {
          const Group& group = w.groups[x];
          const int first = group.m - g * rows;
          ahead.step();
          if (finite) {
            product.block(group.n, out + first * p.out.row_stride, inverse, group.m, panel, group.lo0 - t0,
                          group.hi1 - t0);
          } else {  // 0 * NaN is NaN: a row may meet the keys that it sees, no other
            for (int i = first; i < first + group.n; i++) {
              product.block(1, out + i * p.out.row_stride, inverse, g * rows + i, panel, p.key_begin[r0 + i] - t0,
                            p.key_end[r0 + i] - t0);
            }
          }
        }
      }
  }

  // lse, and 1 / sum of every row, which it returns
  const float* finish_sums(const ForwardScratch& w, int r0, int rows, int h0, int heads) const {
    const int M = rows * heads;
    float *l = w.lo, *inverse = w.hi;  // free by now
    for (int m = 0; m < M; m++) l[m] = vhsum(vload(w.sum + m * VW));
    for (int m = M; m % VW; m++) l[m] = 1.f;
    for (int m = 0; m < M; m += VW) {
      const vf x = vload(l + m);
      vstore(inverse + m, vdiv(vset(1.f), x));
      vstore(w.top + m, vadd(vload(w.top + m), vlog(x)));
    }
    for (int g = 0; g < heads; g++) {
      __builtin_memcpy(p.lse + (h0 + g) * p.total_q + r0, w.top + g * rows, rows * sizeof(float));
    }
    return inverse;
  }

  void finish_rows(const ForwardScratch& w, int r0, int rows, int h0, int heads) const {
    const float* inverse = finish_sums(w, r0, rows, h0, heads);
    for (int g = 0; g < heads; g++) {
      for (int i = 0; i < rows; i++) {
        const int m = g * rows + i;
        const vf scale = vset(inverse[m]);
        T* out = at<T>(p.out, r0 + i, h0 + g);
        for (int d = 0; d < Dv; d += VW) {
          const float* o = w.O + (static_cast<int64_t>(d / NR) * w.cap + m) * NR + d % NR;
          store_out(out + d, vmul(scale, vload(o)), Dv - d, context.stream_out);
        }
      }
    }
  }

  void run(const Item& it, const Item* next, float* scratch) const {
    if (is_direct(context.segments[it.segment], context.runs)) {
      direct_forward<T>(context, it, next, scratch);
    } else {
      blocks(it, next, scratch);
    }
    if (context.stream_out) vfence();
  }

  void blocks(const Item& it, const Item* next, float* scratch) const {
    const ForwardScratch w(p, scratch);
    const int rows = it.b - it.a, together = imax(1, w.cap / rows);
    for (int h = it.h0; h < it.h1; h++)
      for (int g = 0; g < heads_per_key; g += together) {
        Next after;
        if (h + 1 < it.h1) {
          after = {&it, h + 1};
        } else if (next) {
          after = {next, next->h0};
        }
        block(w, context.segments[it.segment], it.a, it.b, h, h * heads_per_key + g,
              imin(together, heads_per_key - g), after);
      }
  }
};

static size_t forward_scratch(const AttentionForwardParams& p) { return ForwardScratch(p, nullptr).floats; }

static void forward(const ForwardContext& context, const Item& item, const Item* next, float* scratch) {
  switch (context.params->dtype) {
    case DType::float32: return Forward<float>{context}.run(item, next, scratch);
    case DType::bfloat16: return Forward<bf16>{context}.run(item, next, scratch);
    case DType::float16: return Forward<fp16>{context}.run(item, next, scratch);
    default: __builtin_trap();  // attention.cpp checked it
  }
}

}  // namespace packattn::cpu::PACKATTN_ISA
