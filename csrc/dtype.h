// at::ScalarType <-> the format's DType.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "bitsparse/format.h"

namespace bitsparse {

inline bool is_supported(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Half:
    case c10::ScalarType::Float:
    case c10::ScalarType::Float8_e4m3fn:
    case c10::ScalarType::Float8_e5m2: return true;
    default: return false;
  }
}

// `argument` names the tensor in the error.
inline DType dtype_of(c10::ScalarType type, const char* argument) {
  switch (type) {
    case c10::ScalarType::BFloat16: return DType::bfloat16;
    case c10::ScalarType::Half: return DType::float16;
    case c10::ScalarType::Float: return DType::float32;
    case c10::ScalarType::Float8_e4m3fn: return DType::float8_e4m3fn;
    case c10::ScalarType::Float8_e5m2: return DType::float8_e5m2;
    default:
      TORCH_CHECK_TYPE(false, "bitsparse: expected ", argument,
                       " to have dtype bfloat16, float16, float32, float8_e4m3fn or float8_e5m2, got ", type);
  }
}

inline c10::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::bfloat16: return c10::ScalarType::BFloat16;
    case DType::float16: return c10::ScalarType::Half;
    case DType::float32: return c10::ScalarType::Float;
    case DType::float8_e4m3fn: return c10::ScalarType::Float8_e4m3fn;
    case DType::float8_e5m2: return c10::ScalarType::Float8_e5m2;
  }
  TORCH_CHECK_VALUE(false, "bitsparse: expected a dtype number of 0 to 4, got ", static_cast<int>(dtype));
}

}  // namespace bitsparse
