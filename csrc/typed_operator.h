// A bitsparse operator by name, to be called through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace bitsparse {

template <class Signature>
c10::TypedOperatorHandle<Signature> typed_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace bitsparse
