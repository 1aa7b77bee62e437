// What every attention kernel is given, on every device: pointers, strides and sizes. No Torch, no CUDA.
//
// The mask is two numbers per query row (docs/design.md): row i sees key j iff key_begin[i] <= j < key_end[i].
// Kernels know nothing of documents, causality or windows.
#pragma once
#include <cstdint>

namespace packattn {

enum class DType : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };

// A [tokens, heads, dim] tensor whose last dimension is contiguous: element (t, h, d) is at
// data[t * row_stride + h * head_stride + d]. Strides count elements and may be 0 (an expanded tensor).
struct TensorView {
  void* data = nullptr;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

struct AttentionForwardParams {
  int64_t total_q = 0;           // Tq, query rows
  int64_t total_k = 0;           // Tk, keys
  int32_t heads_q = 0;           // Hq
  int32_t heads_k = 0;           // Hkv; Hq % Hkv == 0, query head h reads key head h / (Hq / Hkv)
  int32_t head_dim = 0;          // D, of query and key
  int32_t head_dim_v = 0;        // Dv, of value and out
  DType dtype = DType::float32;  // of query, key, value, out and their gradients
  float scale = 1.f;             // score = scale * <q, k>; any finite value
  float softcap = 0.f;           // > 0: score = softcap * tanh(score / softcap)

  TensorView query;  // [Tq, Hq, D]
  TensorView key;    // [Tk, Hkv, D]
  TensorView value;  // [Tk, Hkv, Dv]
  TensorView out;    // [Tq, Hq, Dv], written (forward) or read (backward)

  const int32_t* key_begin = nullptr;  // [Tq]
  const int32_t* key_end = nullptr;    // [Tq]
  const float* sinks = nullptr;        // [Hq], one extra logit per head with value 0; may be nullptr
  float* lse = nullptr;                // [Hq, Tq], natural log, the sink included; -inf where a row sees nothing
};

struct AttentionBackwardParams : AttentionForwardParams {
  TensorView dout;              // [Tq, Hq, Dv]
  const float* dlse = nullptr;  // [Hq, Tq], gradient of lse; may be nullptr (zero)
  TensorView dquery;            // [Tq, Hq, D]
  TensorView dkey;              // [Tk, Hkv, D]
  TensorView dvalue;            // [Tk, Hkv, Dv]
  float* dsinks = nullptr;      // [Hq]; nullptr iff sinks is
};

// How a kernel gets its threads: run(workers, body, context) calls body(context, w) once for each w in
// [0, workers), possibly at the same time, and returns when all have returned. Workers may also run one
// after the other on the calling thread (inside somebody else's parallel region), so no worker may wait
// for one that has not started.
struct Executor {
  int workers = 1;
  void (*run)(int workers, void (*body)(void* context, int worker), void* context) = nullptr;
};

}  // namespace packattn
