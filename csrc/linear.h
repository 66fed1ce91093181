// The backward of a linear layer with exactly the matrix products that eager autograd runs, operand layouts included:
// another layout can choose another GEMM kernel, with other rounding.
#pragma once

#include <ATen/core/TensorBody.h>

namespace bitsparse {

// y = x wᵀ for matrices x (tokens, in) and w (out, in): d loss / d w from d loss / d y.
at::Tensor linear_weight_gradient(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w);
// d loss / d x, for an x with these strides.
at::Tensor linear_input_gradient(const at::Tensor& grad, const at::Tensor& w, bool x_is_column_major);
bool is_column_major(const at::Tensor& matrix);

}  // namespace bitsparse
