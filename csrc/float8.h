// 8-bit floats as training casts make them: rounded to nearest even, saturating at the largest finite value, infinities
// too, and every NaN the canonical one.
#pragma once

#include <ATen/core/TensorBody.h>

namespace bitsparse {

inline bool is_float8(at::ScalarType type) { return type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2; }

namespace float8 {

// float32 values as `type`. `values` may be overwritten.
at::Tensor rounded(at::Tensor values, at::ScalarType type);

// Sets those elements of `t` to +0 whose counterparts in `signs` are neither positive nor NaN.
void keep_positive_(at::Tensor t, const at::Tensor& signs);

}  // namespace float8
}  // namespace bitsparse
