#include "ops.h"
#include "place.h"

namespace packattn::ops {
namespace {

void register_kernels(torch::stable::detail::StableLibrary& m) {
  m.impl("cu_seqlens_from_lengths", TORCH_BOX(&cu_seqlens_from_lengths));
  m.impl("cu_seqlens_from_segment_ids", TORCH_BOX(&cu_seqlens_from_segment_ids));
  m.impl("cu_seqlens_from_position_ids", TORCH_BOX(&cu_seqlens_from_position_ids));
  m.impl("documents_from_segment_ids", TORCH_BOX(&documents_from_segment_ids));
  m.impl("position_ids_from_cu_seqlens", TORCH_BOX(&position_ids_from_cu_seqlens));
  m.impl("segment_ids_from_cu_seqlens", TORCH_BOX(&segment_ids_from_cu_seqlens));
  m.impl("document_ranges", TORCH_BOX(&document_ranges));
  m.impl("key_ranges", TORCH_BOX(&key_ranges));
  m.impl("query_ranges", TORCH_BOX(&query_ranges));
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace
}  // namespace packattn::ops

#if defined(PACKATTN_BACKEND_CUDA)
STABLE_TORCH_LIBRARY_IMPL(packattn, CUDA, m) { packattn::ops::register_kernels(m); }
#elif defined(PACKATTN_BACKEND_EMULATED)
STABLE_TORCH_LIBRARY_IMPL(packattn_emulated, CPU, m) { packattn::ops::register_kernels(m); }
#else
STABLE_TORCH_LIBRARY_IMPL(packattn, CPU, m) { packattn::ops::register_kernels(m); }
#endif
