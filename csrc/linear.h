// The backward of a linear layer with exactly the matrix products that eager autograd runs, operand layouts included:
// another layout can choose another GEMM kernel, with other rounding.
#pragma once

#include <ATen/core/TensorBody.h>

namespace bitsparse {

// y = x wt for matrices x (tokens, in) and wt (in, out), a transposed weight: d loss / d wtᵀ from d loss / d y.
at::Tensor linear_weight_gradient(const at::Tensor& grad, const at::Tensor& x, bool wt_is_column_major);
// d loss / d x, for an x with these strides.
at::Tensor linear_input_gradient(const at::Tensor& grad, const at::Tensor& wt, bool x_is_column_major);
bool is_column_major(const at::Tensor& matrix);

}  // namespace bitsparse
