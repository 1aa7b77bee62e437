// packattn._C: what is no tensor op. Bindings only; the work is done elsewhere.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../common/serves.h"
#include "../cpu/isa.h"
#include "../cuda/select.h"
#include "build_config.h"
#include "packer.h"

namespace py = pybind11;

namespace {

// Hands a vector's memory to numpy, without a copy.
py::array_t<int64_t> to_numpy(std::vector<int64_t>&& values) {
  auto* kept = new std::vector<int64_t>(std::move(values));
  py::capsule owner(kept, [](void* p) { delete static_cast<std::vector<int64_t>*>(p); });
  return py::array_t<int64_t>(static_cast<py::ssize_t>(kept->size()), kept->data(), owner);
}

py::tuple pack(const py::array_t<int64_t, py::array::c_style>& lengths, int64_t capacity, const std::string& algorithm,
               int64_t num_bins) {
  if (lengths.ndim() != 1) throw py::value_error("lengths must have one dimension");
  packattn::BinOrder bins;
  {
    py::gil_scoped_release release;
    bins = packattn::pack(lengths.data(), lengths.size(), capacity, algorithm, num_bins);
  }
  return py::make_tuple(to_numpy(std::move(bins.order)), to_numpy(std::move(bins.offsets)));
}

// (kernel, why it is not a tensor-core kernel) for a call that cuda_refusals lets pass.
py::tuple cuda_kernel(const std::string& dtype, int64_t head_dim, int64_t head_dim_v, int capability) {
  packattn::cuda::Call call;
  call.dtype = dtype == "bfloat16"  ? packattn::DType::bfloat16
               : dtype == "float16" ? packattn::DType::float16
                                    : packattn::DType::float32;
  call.head_dim = head_dim;
  call.head_dim_v = head_dim_v;
  call.capability = capability;
  call.mapped = true;  // as every tensor is that is not expanded
  const packattn::cuda::Choice choice = packattn::cuda::select(call);
  return py::make_tuple(packattn::cuda::describe(choice), packattn::cuda::sm80_refusals(call));
}

py::dict build_info() {
  py::dict info;
  info["version"] = PACKATTN_VERSION;
  info["compiler"] = PACKATTN_COMPILER;
  info["system"] = PACKATTN_SYSTEM;
  info["build_type"] = PACKATTN_BUILD_TYPE;
  info["flags"] = PACKATTN_FLAGS;
  info["sanitize"] = PACKATTN_SANITIZE;
  info["torch_version"] = PACKATTN_TORCH_VERSION;
  info["torch_target"] = PACKATTN_TORCH_TARGET;
  info["cuda"] = py::bool_(PACKATTN_HAS_CUDA);
  info["cuda_reason"] = PACKATTN_CUDA_REASON;
  info["cuda_arch_list"] = PACKATTN_CUDA_ARCH_LIST;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m, py::mod_gil_not_used()) {
  m.def("pack", &pack, py::arg("lengths"), py::arg("capacity"), py::arg("algorithm"), py::arg("num_bins"));
  m.def("build_info", &build_info);
  m.def("cpu_isa", &packattn::cpu::isa);
  m.def("cpu_isas", &packattn::cpu::available_isas);
  m.def("cpu_refusals", &packattn::cpu_refusals, py::arg("dtype"), py::arg("head_dim"), py::arg("head_dim_v"));
  m.def("cuda_refusals", &packattn::cuda::cuda_refusals, py::arg("dtype"), py::arg("head_dim"), py::arg("head_dim_v"));
  m.def("cuda_kernel", &cuda_kernel, py::arg("dtype"), py::arg("head_dim"), py::arg("head_dim_v"),
        py::arg("capability"));
}
