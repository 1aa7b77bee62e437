// How ops refuse: every message says which op and argument, what was wanted and what came. An op throws
// std::runtime_error, which reaches Python as RuntimeError.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

namespace packattn::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

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

// Runs Torch-free code, whose refusals are std::invalid_argument without the op's name.
template <typename Body>
void named(const char* op, const Body& body) {
  try {
    body();
  } catch (const std::invalid_argument& error) {
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

// As "int64 [11] on cpu". Another device is not named: no shim gives its name, and these ops take no other.
inline std::ostream& operator<<(std::ostream& stream, const Described& described) {
  const Tensor& tensor = described.tensor;
  return stream << dtype_name(tensor.scalar_type()) << ' ' << Sizes{tensor}
                << (tensor.is_cpu() ? " on cpu" : " on another device");
}

inline void require_cpu(const char* op, const char* name, const Tensor& tensor) {
  require(tensor.is_cpu(), op, name, " must be on cpu, got ", Described{tensor});
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
  require_cpu(op, name, tensor);
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
  require_cpu(op, name, tensor);
  const ScalarType dtype = tensor.scalar_type();
  require(dtype == ScalarType::Int || dtype == ScalarType::Long, op, name, " must be int32 or int64, got ",
          Described{tensor});
}

inline void require_integer_vector(const char* op, const char* name, const Tensor& tensor, const char* meaning) {
  require_integers(op, name, tensor);
  require(tensor.dim() == 1, op, name, " must be 1-D ", meaning, ", got ", Described{tensor});
}

// The tensor itself if its elements lie one after the other; asking is much cheaper than dispatching contiguous().
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline Tensor empty_cpu(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::empty({sizes.begin(), sizes.size()}, dtype);
}

}  // namespace packattn::ops
