#include "bitsparse/nn.h"

#include "bitsparse/functional.h"
#include "names.h"

namespace bitsparse::nn {

ReLUSquaredFFNImpl::ReLUSquaredFFNImpl(const ReLUSquaredFFNOptions& given) : options(given) {
  TORCH_CHECK_VALUE(options.d_model() > 0, "bitsparse: ReLUSquaredFFN: expected d_model > 0, got ", options.d_model());
  TORCH_CHECK_VALUE(options.d_ff() >= 0, "bitsparse: ReLUSquaredFFN: expected d_ff > 0 (or 0 for 4 * d_model), got ",
                    options.d_ff());
  parse_codec(options.codec());
  if (options.d_ff() == 0) options.d_ff(4 * options.d_model());
  reset();
}

void ReLUSquaredFFNImpl::reset() {
  using torch::nn::LinearOptions;
  fc = register_module("fc", torch::nn::Linear(LinearOptions(options.d_model(), options.d_ff()).bias(options.bias())));
  proj =
      register_module("proj", torch::nn::Linear(LinearOptions(options.d_ff(), options.d_model()).bias(options.bias())));
}

void ReLUSquaredFFNImpl::pretty_print(std::ostream& stream) const {
  stream << "bitsparse::nn::ReLUSquaredFFN(d_model=" << options.d_model() << ", d_ff=" << options.d_ff()
         << ", bias=" << std::boolalpha << options.bias() << ", codec=" << options.codec()
         << ", fused=" << options.fused() << ")";
}

at::Tensor ReLUSquaredFFNImpl::forward(const at::Tensor& x) {
  const auto bias = [&](const torch::nn::Linear& layer) {
    return options.bias() ? std::optional(layer->bias) : std::nullopt;
  };
  return relu_squared_ffn(x, fc->weight, bias(fc), proj->weight, bias(proj), options.codec(), options.fused());
}

}  // namespace bitsparse::nn
