// Attention ops: check -> allocate -> fill params -> launch. Forward and backward share the checks and the filling;
// every device shares the ops (attention_backend.h).
#include <array>
#include <cmath>
#include <string>

#include "attention_backend.h"
#include "checks.h"
#include "ops.h"

namespace packattn::ops {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

// What forward and backward have in common, as the caller gave it.
struct Inputs {
  const char* op;
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const Tensor& key_begin;
  const Tensor& key_end;
  const std::optional<Tensor>& sinks;
  double scale;
  double softcap;

  int64_t total_q() const { return query.size(0); }
  int64_t total_k() const { return key.size(0); }
  int64_t heads_q() const { return query.size(1); }
  int64_t heads_k() const { return key.size(1); }
  int64_t head_dim() const { return query.size(2); }
  int64_t head_dim_v() const { return value.size(2); }
  ScalarType dtype() const { return query.scalar_type(); }
  // lse is as precise as the sums it comes from.
  ScalarType lse_dtype() const { return dtype() == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }
};

bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ||
         dtype == ScalarType::Double;
}

void require_tokens(const Inputs& in, const char* name, const Tensor& tensor, const char* meaning) {
  require_device(in.op, name, tensor);
  require(tensor.dim() == 3, in.op, name, " must be 3-D ", meaning, ", got ", Described{tensor});
  require(is_floating(tensor.scalar_type()), in.op, name, " must be float32, bfloat16, float16 or float64, got ",
          Described{tensor});
  require(tensor.scalar_type() == in.dtype(), in.op, name, " must be ", dtype_name(in.dtype()), " like query, got ",
          Described{tensor});
  require(tensor.size(1) >= 1 && tensor.size(2) >= 1, in.op, name, " must be ", meaning,
          " with at least one head and one element, got ", Described{tensor});
  require(tensor.size(0) <= kInt32Max && tensor.size(1) <= kInt32Max, in.op, name, " must have at most ", kInt32Max,
          " tokens and heads, got ", Described{tensor});
}

void check(const Inputs& in) {
  require_tokens(in, "query", in.query, "[total_q, heads_q, head_dim]");
  require_tokens(in, "key", in.key, "[total_k, heads_k, head_dim]");
  require_tokens(in, "value", in.value, "[total_k, heads_k, head_dim_v]");
  require(in.key.size(2) == in.head_dim(), in.op, "key must have head_dim ", in.head_dim(), " like query, got ",
          Described{in.key});
  require(in.value.size(0) == in.total_k() && in.value.size(1) == in.heads_k(), in.op, "value must be [", in.total_k(),
          ", ", in.heads_k(), ", head_dim_v] like key, got ", Described{in.value});
  require(in.heads_q() % in.heads_k() == 0, in.op, "heads_q must be a multiple of heads_k, got ", in.heads_q(),
          " query heads and ", in.heads_k(), " key heads");
  require_tensor(in.op, "key_begin", in.key_begin, ScalarType::Int, "[total_q]", {in.total_q()});
  require_tensor(in.op, "key_end", in.key_end, ScalarType::Int, "[total_q]", {in.total_q()});
  if (in.sinks) {
    require_device(in.op, "sinks", *in.sinks);
    require(is_floating(in.sinks->scalar_type()) && has_sizes(*in.sinks, {in.heads_q()}), in.op,
            "sinks must be float32, bfloat16, float16 or float64 [heads_q] = [", in.heads_q(), "], got ",
            Described{*in.sinks});
  }
  require_one_device(in.op, {{"query", &in.query},
                             {"key", &in.key},
                             {"value", &in.value},
                             {"key_begin", &in.key_begin},
                             {"key_end", &in.key_end},
                             {"sinks", in.sinks ? &*in.sinks : nullptr}});
  // Kernels compute in float32, where a finite double may not be finite.
  require(std::isfinite(static_cast<float>(in.scale)), in.op, "scale must be finite in float32, got ", in.scale);
  require(std::isfinite(static_cast<float>(in.softcap)) && in.softcap >= 0, in.op,
          "softcap must be at least 0 (0: no cap) and finite in float32, got ", in.softcap);
  // Kernels take the inverse of the cap, and the cap in units of log 2.
  require(in.softcap == 0 || (in.softcap >= 1e-30 && in.softcap <= 1e30), in.op,
          "softcap must be 0 (no cap) or from 1e-30 to 1e30, got ", in.softcap);
}

// Whether a compiled kernel serves the call; otherwise the plain PyTorch op of the same schema does.
bool compiled_serves(const Inputs& in) {
  return backend::refusals(dtype_name(in.dtype()), in.head_dim(), in.head_dim_v()).empty();
}

// Calls an op of the namespace that is written in Python. `stack` holds the arguments, then the results.
void call_reference(const char* op, const char* reference, StableIValue* stack) {
  // libtorch prints what was thrown; from here it cannot be read before torch 2.13.
  if (torch_call_dispatcher(reference, "", stack, TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    refuse(op, "no compiled kernel serves these arguments, and ", reference, " failed (its error is printed above)");
  }
}

// The stride of a dimension of one entry is anything, and is never used.
TensorView view(const Tensor& tensor, void* data) {
  const auto stride = [&](int64_t dim) { return tensor.size(dim) > 1 ? tensor.stride(dim) : 0; };
  return TensorView{data, stride(0), stride(1)};
}

// Kernels only read through the views of inputs; the struct has no second, const kind of view.
TensorView input_view(const Tensor& tensor) { return view(tensor, const_cast<void*>(tensor.const_data_ptr())); }

// The tensor itself if a kernel can read it: the last dimension must be contiguous, and the rest as the device wants
// it.
Tensor readable(const Tensor& tensor) {
  const int bytes = static_cast<int>(tensor.element_size());
  if (tensor.stride(2) == 1 && backend::is_aligned(input_view(tensor), bytes)) return tensor;
  // clone() alone keeps the order of the strides, and of a tensor that overlaps itself (windows over a signal) it may
  // make one whose last dimension is not contiguous. contiguous() alone copies nothing that only begins at an odd
  // address.
  return tensor.is_contiguous() ? torch::stable::clone(tensor) : torch::stable::contiguous(tensor);
}

TensorView output_view(const Tensor& tensor) { return view(tensor, tensor.mutable_data_ptr()); }

std::optional<Tensor> as_float32(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  const bool converted = tensor->scalar_type() == ScalarType::Float;
  return as_contiguous(converted ? *tensor : torch::stable::to(*tensor, ScalarType::Float));
}

DType kernel_dtype(ScalarType dtype) {
  if (dtype == ScalarType::BFloat16) return DType::bfloat16;
  if (dtype == ScalarType::Half) return DType::float16;
  return DType::float32;
}

// The inputs as a kernel reads them. Holds the copies that the params point into.
class KernelInputs {
 public:
  explicit KernelInputs(const Inputs& in)
      : query_(readable(in.query)),
        key_(readable(in.key)),
        value_(readable(in.value)),
        key_begin_(as_contiguous(in.key_begin)),
        key_end_(as_contiguous(in.key_end)),
        sinks_(as_float32(in.sinks)),
        in_(in) {}

  void fill(AttentionForwardParams& params) const {
    params.total_q = in_.total_q();
    params.total_k = in_.total_k();
    params.heads_q = static_cast<int32_t>(in_.heads_q());
    params.heads_k = static_cast<int32_t>(in_.heads_k());
    params.head_dim = static_cast<int32_t>(in_.head_dim());
    params.head_dim_v = static_cast<int32_t>(in_.head_dim_v());
    params.dtype = kernel_dtype(in_.dtype());
    params.scale = static_cast<float>(in_.scale);
    params.softcap = static_cast<float>(in_.softcap);
    params.query = input_view(query_);
    params.key = input_view(key_);
    params.value = input_view(value_);
    params.key_begin = key_begin_.const_data_ptr<int32_t>();
    params.key_end = key_end_.const_data_ptr<int32_t>();
    params.sinks = sinks_ ? sinks_->const_data_ptr<float>() : nullptr;
  }

 private:
  Tensor query_;
  Tensor key_;
  Tensor value_;
  Tensor key_begin_;
  Tensor key_end_;
  std::optional<Tensor> sinks_;
  const Inputs& in_;
};

void check_ranges(const Inputs& in, bool kernel_runs) {
  if (!backend::checks_ranges(kernel_runs)) return;
  const Tensor begin = on_host(as_contiguous(in.key_begin));
  const Tensor end = on_host(as_contiguous(in.key_end));
  named(in.op, [&] {
    cpu::check_key_ranges(begin.const_data_ptr<int32_t>(), end.const_data_ptr<int32_t>(), in.total_q(), in.total_k());
  });
}

}  // namespace

std::tuple<Tensor, Tensor> attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const Tensor& key_begin, const Tensor& key_end,
                                             const std::optional<Tensor>& sinks, double scale, double softcap) {
  const Inputs in{"attention_forward", query, key, value, key_begin, key_end, sinks, scale, softcap};
  check(in);
  const bool served = compiled_serves(in);
  check_ranges(in, served);
  if (!served) {
    std::array<StableIValue, 8> stack{from(query),   from(key),   from(value), from(key_begin),
                                      from(key_end), from(sinks), from(scale), from(softcap)};
    call_reference(in.op, backend::kForwardReference, stack.data());
    return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
  }

  const Place place(query);
  Tensor out = place.empty({in.total_q(), in.heads_q(), in.head_dim_v()}, in.dtype());
  Tensor lse = place.empty({in.heads_q(), in.total_q()}, ScalarType::Float);
  const KernelInputs inputs(in);
  AttentionForwardParams params;
  inputs.fill(params);
  params.out = output_view(out);
  params.lse = lse.mutable_data_ptr<float>();
  named(in.op, [&] { backend::attention_forward(params, place); });
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& dout, const std::optional<Tensor>& dlse,
                                                              const Tensor& query, const Tensor& key,
                                                              const Tensor& value, const Tensor& out, const Tensor& lse,
                                                              const Tensor& key_begin, const Tensor& key_end,
                                                              const std::optional<Tensor>& sinks, double scale,
                                                              double softcap) {
  const Inputs in{"attention_backward", query, key, value, key_begin, key_end, sinks, scale, softcap};
  check(in);
  const auto require_like_out = [&](const char* name, const Tensor& tensor) {
    require_tensor(in.op, name, tensor, in.dtype(), "[total_q, heads_q, head_dim_v]",
                   {in.total_q(), in.heads_q(), in.head_dim_v()});
  };
  const auto require_like_lse = [&](const char* name, const Tensor& tensor) {
    require_tensor(in.op, name, tensor, in.lse_dtype(), "[heads_q, total_q]", {in.heads_q(), in.total_q()});
  };
  require_like_out("out", out);
  require_like_out("dout", dout);
  require_like_lse("lse", lse);
  if (dlse) require_like_lse("dlse", *dlse);
  require_one_device(
      in.op, {{"query", &query}, {"out", &out}, {"dout", &dout}, {"lse", &lse}, {"dlse", dlse ? &*dlse : nullptr}});
  const bool served = compiled_serves(in);
  check_ranges(in, served);
  if (!served) {
    std::array<StableIValue, 12> stack{from(dout),    from(dlse),  from(query), from(key),
                                       from(value),   from(out),   from(lse),   from(key_begin),
                                       from(key_end), from(sinks), from(scale), from(softcap)};
    call_reference(in.op, backend::kBackwardReference, stack.data());
    return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2]), to<Tensor>(stack[3])};
  }

  const Place place(query);
  Tensor dquery = place.empty({in.total_q(), in.heads_q(), in.head_dim()}, in.dtype());
  Tensor dkey = place.empty({in.total_k(), in.heads_k(), in.head_dim()}, in.dtype());
  Tensor dvalue = place.empty({in.total_k(), in.heads_k(), in.head_dim_v()}, in.dtype());
  Tensor dsinks = place.empty({sinks ? in.heads_q() : 0}, ScalarType::Float);
  const KernelInputs inputs(in);
  const Tensor out_read = readable(out);
  const Tensor dout_read = readable(dout);
  const Tensor lse_read = as_contiguous(lse);
  const std::optional<Tensor> dlse_read = as_float32(dlse);
  AttentionBackwardParams params;
  inputs.fill(params);
  params.out = input_view(out_read);
  params.lse = const_cast<float*>(lse_read.const_data_ptr<float>());
  params.dout = input_view(dout_read);
  params.dlse = dlse_read ? dlse_read->const_data_ptr<float>() : nullptr;
  params.dquery = output_view(dquery);
  params.dkey = output_view(dkey);
  params.dvalue = output_view(dvalue);
  params.dsinks = sinks ? dsinks.mutable_data_ptr<float>() : nullptr;
  named(in.op, [&] { backend::attention_backward(params, place); });
  if (sinks && sinks->scalar_type() != ScalarType::Float) dsinks = torch::stable::to(dsinks, sinks->scalar_type());
  return {dquery, dkey, dvalue, dsinks};
}

}  // namespace packattn::ops
