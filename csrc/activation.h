// The dense activations by PyTorch's own operators: what every result is bit-identical to.
#pragma once

#include <ATen/core/TensorBody.h>

#include "bitsparse/arena.h"

namespace bitsparse {

// From relu(h): relu(h)^2 or itself, in place.
void activate_relu_(at::Tensor& relu, Activation activation);
// d loss / d h from relu(h) and d loss / d activation, with eager autograd's operations and order of rounding.
at::Tensor activation_gradient(const at::Tensor& relu, const at::Tensor& grad, Activation activation);

}  // namespace bitsparse
