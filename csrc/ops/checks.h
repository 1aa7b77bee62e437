// How ops refuse: every message says which op and argument, what was wanted and what came. An op throws
// std::runtime_error, which reaches Python as RuntimeError.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

#include "place.h"

namespace packattn::ops {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

template <typename... Parts>
[[noreturn]] void refuse(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

template <typename... Parts>
void require(bool ok, const char* op, const Parts&... parts) {
  if (!ok) refuse(op, parts...);
}

// Runs Torch-free code. Its refusals are std::invalid_argument and its failures std::runtime_error, without the op's
// name.
template <typename Body>
void named(const char* op, const Body& body) {
  try {
    body();
  } catch (const std::invalid_argument& error) {
    refuse(op, error.what());
  } catch (const std::runtime_error& error) {
    refuse(op, error.what());
  }
}

// Torch's Python name of a dtype.
inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Short: return "int16";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Bool: return "bool";
    default: return torch::headeronly::toString(dtype);
  }
}

// Both stream a description of a tensor, and only if they are streamed: arguments of require() are always evaluated.
struct Sizes {
  const Tensor& tensor;
};
struct Described {
  const Tensor& tensor;
};

inline std::ostream& operator<<(std::ostream& stream, const Sizes& sizes) {
  stream << '[';
  for (int64_t d = 0; d < sizes.tensor.dim(); ++d) stream << (d ? ", " : "") << sizes.tensor.size(d);
  return stream << ']';
}

// As "int64 [11] on cpu". Devices other than these two are not named: no shim gives the name, and no op takes them.
inline std::ostream& operator<<(std::ostream& stream, const Described& described) {
  const Tensor& tensor = described.tensor;
  stream << dtype_name(tensor.scalar_type()) << ' ' << Sizes{tensor} << " on ";
  if (tensor.is_cpu()) return stream << "cpu";
  if (tensor.is_cuda()) return stream << "cuda:" << tensor.get_device_index();
  return stream << "another device";
}

inline void require_device(const char* op, const char* name, const Tensor& tensor) {
  require(is_here(tensor), op, name, " must be on ", kDevice, ", got ", Described{tensor});
}

struct Named {
  const char* name;
  const Tensor* tensor;  // nullptr: an optional argument that was not given
};

// All of them on the device of the first: of several GPUs, the same one.
inline void require_one_device(const char* op, std::initializer_list<Named> tensors) {
#if defined(PACKATTN_BACKEND_CUDA)
  const Named& first = *tensors.begin();
  for (const Named& other : tensors) {
    if (other.tensor == nullptr || other.tensor->get_device_index() == first.tensor->get_device_index()) continue;
    refuse(op, other.name, " must be on cuda:", first.tensor->get_device_index(), " like ", first.name, ", got ",
           Described{*other.tensor});
  }
#else
  (void)op, (void)tensors;
#endif
}

inline bool has_sizes(const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  if (tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t d = 0;
  for (const int64_t size : sizes) {
    if (tensor.size(d++) != size) return false;
  }
  return true;
}

// dtype and exact sizes; `meaning` names the sizes, as "[heads_q, total_q]".
inline void require_tensor(const char* op, const char* name, const Tensor& tensor, ScalarType dtype,
                           const char* meaning, std::initializer_list<int64_t> sizes) {
  require_device(op, name, tensor);
  if (tensor.scalar_type() == dtype && has_sizes(tensor, sizes)) return;
  std::ostringstream wanted;
  const char* separator = "";
  for (const int64_t size : sizes) {
    wanted << separator << size;
    separator = ", ";
  }
  refuse(op, name, " must be ", dtype_name(dtype), " ", meaning, " = [", wanted.str(), "], got ", Described{tensor});
}

inline void require_integers(const char* op, const char* name, const Tensor& tensor) {
  require_device(op, name, tensor);
  const ScalarType dtype = tensor.scalar_type();
  require(dtype == ScalarType::Int || dtype == ScalarType::Long, op, name, " must be int32 or int64, got ",
          Described{tensor});
}

inline void require_integer_vector(const char* op, const char* name, const Tensor& tensor, const char* meaning) {
  require_integers(op, name, tensor);
  require(tensor.dim() == 1, op, name, " must be 1-D ", meaning, ", got ", Described{tensor});
}

// max_segments, which limits an output of `count` segments.
inline void require_capacity(const char* op, int64_t count, int64_t max_segments) {
  require(max_segments >= 0, op, "max_segments must be at least 0, got ", max_segments);
  require(max_segments < kInt32Max, op, "max_segments must be less than ", kInt32Max, ", got ", max_segments);
  require(max_segments >= count, op, "max_segments must be at least the number of segments, ", count, ", got ",
          max_segments);
}

// The tensor itself if its elements lie one after the other; asking is much cheaper than dispatching contiguous().
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A copy in host memory; the tensor itself where it lies there. Waits for the device.
inline Tensor on_host(const Tensor& tensor) {
  return tensor.is_cpu() ? tensor
                         : torch::stable::to(tensor, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

}  // namespace packattn::ops
