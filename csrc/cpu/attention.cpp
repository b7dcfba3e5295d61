// Entry points of the CPU attention library (a plain C interface: no torch headers, seconds to compile).
#include "attention.h"

#include "backward.h"
#include "forward.h"

extern "C" {

int32_t magi_attention_forward(const magi::Attention* attention) { return magi::Forward(*attention).run(); }

int32_t magi_attention_backward(const magi::Attention* attention) { return magi::Backward(*attention).run(); }

// Lanes of a vector: how this build was compiled.
int32_t magi_lanes() { return magi::kLanes; }

}  // extern "C"
