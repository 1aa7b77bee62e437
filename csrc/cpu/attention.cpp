#include "attention.h"

#include <stdexcept>

namespace packattn::cpu {

void attention_forward(const AttentionForwardParams&, const Executor&) { throw std::runtime_error("not built yet"); }
void attention_backward(const AttentionBackwardParams&, const Executor&) { throw std::runtime_error("not built yet"); }

}  // namespace packattn::cpu
