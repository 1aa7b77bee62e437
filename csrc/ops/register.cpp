#include "ops.h"

STABLE_TORCH_LIBRARY_IMPL(packattn, CPU, m) {
  namespace ops = packattn::ops;
  m.impl("cu_seqlens_from_lengths", TORCH_BOX(&ops::cu_seqlens_from_lengths));
  m.impl("cu_seqlens_from_segment_ids", TORCH_BOX(&ops::cu_seqlens_from_segment_ids));
  m.impl("cu_seqlens_from_position_ids", TORCH_BOX(&ops::cu_seqlens_from_position_ids));
  m.impl("documents_from_segment_ids", TORCH_BOX(&ops::documents_from_segment_ids));
  m.impl("position_ids_from_cu_seqlens", TORCH_BOX(&ops::position_ids_from_cu_seqlens));
  m.impl("segment_ids_from_cu_seqlens", TORCH_BOX(&ops::segment_ids_from_cu_seqlens));
  m.impl("document_ranges", TORCH_BOX(&ops::document_ranges));
  m.impl("key_ranges", TORCH_BOX(&ops::key_ranges));
  m.impl("query_ranges", TORCH_BOX(&ops::query_ranges));
  m.impl("attention_forward", TORCH_BOX(&ops::attention_forward));
  m.impl("attention_backward", TORCH_BOX(&ops::attention_backward));
}
