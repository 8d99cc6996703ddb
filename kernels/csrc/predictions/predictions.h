// The loss and the entropy of predictions, from logits: what the launch reads and writes.
#pragma once

#include <cstdint>

namespace twell::predictions {

// logits: [rows, columns], bfloat16 or half, columns a multiple of eight, rows at addresses of 16 bytes; ids: [rows],
// the tokens that came; out: float32 [2, rows], the loss of each and the entropy of its prediction, in nats.
template <typename T>
void launch(const void* logits, const int64_t* ids, float* out, int64_t rows, int columns, void* stream);

}  // namespace twell::predictions
