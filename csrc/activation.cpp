#include "activation.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/threshold_backward.h>

namespace bitsparse {

void activate_relu_(at::Tensor& relu, Activation activation) {
  if (activation == Activation::relu_squared) at::pow_out(relu, relu, 2);  // what Tensor.square() is
}

at::Tensor activation_gradient(const at::Tensor& relu, const at::Tensor& grad, Activation activation) {
  if (activation == Activation::relu) return at::threshold_backward(grad, relu, 0);
  return at::threshold_backward(at::mul(grad, at::mul(relu, 2.0)), relu, 0);
}

}  // namespace bitsparse
