// Attention over key ranges on the CPU: the entry points. What the fields mean: csrc/common/params.h.
#pragma once
#include "../common/params.h"

namespace packattn::cpu {

// Writes every element of out and lse. Rows with key_begin >= key_end see nothing: out 0, lse -inf.
// The other rows must have nondecreasing key_begin and key_end within [0, total_k].
// Throws std::invalid_argument for key ranges, sizes or a dtype that this cannot serve.
void attention_forward(const AttentionForwardParams& params, const Executor& executor);

// Writes every element of dquery, dkey, dvalue and (if given) dsinks, from out and lse of the forward.
// Deterministic; the same requirements and errors as the forward.
void attention_backward(const AttentionBackwardParams& params, const Executor& executor);

}  // namespace packattn::cpu
