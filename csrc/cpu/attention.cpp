// Entry points of the CPU attention library (a plain C interface: no torch headers, seconds to compile).
#include "attention.h"

#include "amx_backward.h"
#include "amx_forward.h"
#include "backward.h"
#include "float_backward.h"
#include "float_forward.h"
#include "forward.h"

#define MAGI_EXPORT extern "C" __attribute__((visibility("default")))

#if defined(MAGI_HAS_AMX)
static bool use_amx(const magi::Attention& attention) {
  return attention.q.type == magi::Type::kBFloat16 && magi::amx_allowed();
}
#endif

MAGI_EXPORT int32_t magi_attention_forward(const magi::Attention* attention) {
#if defined(MAGI_HAS_AMX)
  // Packing the keys does not pay for few queries.
  if (use_amx(*attention) && attention->q_len > magi::kFewRows) {
    return magi::Forward<magi::AmxForward>(*attention).run();
  }
#endif
  return magi::Forward<magi::FloatForward>(*attention).run();
}

MAGI_EXPORT int32_t magi_attention_backward(const magi::Attention* attention) {
#if defined(MAGI_HAS_AMX)
  if (use_amx(*attention)) return magi::Backward<magi::AmxBackward>(*attention).run();
#endif
  return magi::Backward<magi::FloatBackward>(*attention).run();
}
