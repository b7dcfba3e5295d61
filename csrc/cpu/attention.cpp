// Entry points of the CPU attention library (a plain C interface: no torch headers, seconds to compile).
#include "attention.h"

#include "amx_products.h"
#include "backward.h"
#include "float_products.h"
#include "forward.h"

#define MAGI_EXPORT extern "C" __attribute__((visibility("default")))

MAGI_EXPORT int32_t magi_attention_forward(const magi::Attention* attention) {
#if defined(MAGI_HAS_AMX)
  if (attention->q.type == magi::Type::kBFloat16 && magi::amx_allowed()) {
    return magi::Forward<magi::AmxProducts>(*attention).run();
  }
#endif
  return magi::Forward<magi::FloatProducts>(*attention).run();
}

MAGI_EXPORT int32_t magi_attention_backward(const magi::Attention* attention) {
  return magi::Backward(*attention).run();
}
