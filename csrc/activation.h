// The dense activations by PyTorch's own operators: what every result is bit-identical to.
//
// PyTorch has no arithmetic for 8-bit floats. There a result is that of float arithmetic, rounded once, as float8.h
// says; relu and its gradient keep bits.
#pragma once

#include <ATen/core/TensorBody.h>

#include "bitsparse/arena.h"

namespace bitsparse {

// h to relu(h), in place.
void relu_(at::Tensor& h);
// From relu(h): relu(h)^2 or itself, in place.
void activate_relu_(at::Tensor& relu, Activation activation);
// d loss / d h from relu(h) and d loss / d activation, with eager autograd's operations and order of rounding.
at::Tensor activation_gradient(const at::Tensor& relu, const at::Tensor& grad, Activation activation);

}  // namespace bitsparse
