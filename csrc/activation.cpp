#include "activation.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>

#include "float8.h"

namespace bitsparse {

void relu_(at::Tensor& h) {
  if (is_float8(h.scalar_type())) return float8::keep_positive_(h, h);
  at::relu_(h);
}

void activate_relu_(at::Tensor& relu, Activation activation) {
  if (activation == Activation::relu) return;
  if (is_float8(relu.scalar_type())) {
    relu.copy_(float8::rounded(relu.to(at::kFloat).square_(), relu.scalar_type()));
  } else {
    at::pow_out(relu, relu, 2);  // what Tensor.square() is
  }
}

at::Tensor activation_gradient(const at::Tensor& relu, const at::Tensor& grad, Activation activation) {
  if (is_float8(relu.scalar_type())) {
    at::Tensor result =
        activation == Activation::relu
            ? grad.clone()
            : float8::rounded(grad.to(at::kFloat).mul_(2.0).mul_(relu.to(at::kFloat)), grad.scalar_type());
    float8::keep_positive_(result, relu);
    return result;
  }
  if (activation == Activation::relu) return at::threshold_backward(grad, relu, 0);
  return at::threshold_backward(at::mul(grad, at::mul(relu, 2.0)), relu, 0);
}

}  // namespace bitsparse
