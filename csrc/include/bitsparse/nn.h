// The feed-forward block as a torch::nn module.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <string>

namespace bitsparse::nn {

struct ReLUSquaredFFNOptions {
  explicit ReLUSquaredFFNOptions(std::int64_t d_model) : d_model_(d_model) {}
  TORCH_ARG(std::int64_t, d_model);
  TORCH_ARG(std::int64_t, d_ff) = 0;  // 0: 4 * d_model
  TORCH_ARG(bool, bias) = true;
  TORCH_ARG(std::string, codec) = "tight";
  TORCH_ARG(bool, fused) = false;  // as for relu_squared_ffn; not exact
};

// proj(relu(fc(x))²) with the activation kept compressed for backward. Bit-identical to at::linear, relu, square,
// at::linear; torch::nn::Linear itself adds the bias in a rounding step of its own where its input is no matrix.
// Parameters are fc.weight (d_ff, d_model), fc.bias, proj.weight (d_model, d_ff), proj.bias, initialised as the two
// Linear modules.
class ReLUSquaredFFNImpl : public torch::nn::Cloneable<ReLUSquaredFFNImpl> {
 public:
  explicit ReLUSquaredFFNImpl(std::int64_t d_model) : ReLUSquaredFFNImpl(ReLUSquaredFFNOptions(d_model)) {}
  explicit ReLUSquaredFFNImpl(const ReLUSquaredFFNOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  // x (..., d_model) -> (..., d_model)
  at::Tensor forward(const at::Tensor& x);

  ReLUSquaredFFNOptions options;
  torch::nn::Linear fc{nullptr}, proj{nullptr};
};
TORCH_MODULE(ReLUSquaredFFN);

}  // namespace bitsparse::nn
