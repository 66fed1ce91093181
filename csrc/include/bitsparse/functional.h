// The feed-forward block with a compressed activation, as functions.
#pragma once

#include <ATen/core/TensorBody.h>

#include <optional>
#include <string_view>

namespace bitsparse {

// relu(x w1ᵀ + b1)² w2ᵀ + b2 (Primer, So et al. 2021). x (..., d_model), w1 (d_ff, d_model), b1 (d_ff), w2 (d_out,
// d_ff), b2 (d_out), all of one dtype (BF16, FP16, FP32) and one device. Output and gradients are bit-identical to the
// dense block in eager mode. Backward keeps x, the weights and a compressed form of the activation. Work goes to the
// current stream; the host does not wait. codec: "raw", "signless" or "tight". fused: the first matrix product may be
// one of our own that compresses as it goes, where there is one (docs/performance.md); faster, and rounded like any
// other. Errors: c10::TypeError, c10::ValueError naming the argument; OutOfArenaMemory.
at::Tensor relu_squared_ffn(const at::Tensor& x, const at::Tensor& w1, const std::optional<at::Tensor>& b1,
                            const at::Tensor& w2, const std::optional<at::Tensor>& b2 = std::nullopt,
                            std::string_view codec = "tight", bool fused = false);
// The same with relu instead of relu².
at::Tensor relu_ffn(const at::Tensor& x, const at::Tensor& w1, const std::optional<at::Tensor>& b1,
                    const at::Tensor& w2, const std::optional<at::Tensor>& b2 = std::nullopt,
                    std::string_view codec = "tight", bool fused = false);

// relu(h)² w2ᵀ + b2 from the pre-activation h (..., d_ff), for models that compute h themselves. h is not modified.
at::Tensor relu_squared_linear(const at::Tensor& h, const at::Tensor& w2,
                               const std::optional<at::Tensor>& b2 = std::nullopt, std::string_view codec = "tight");
at::Tensor relu_linear(const at::Tensor& h, const at::Tensor& w2, const std::optional<at::Tensor>& b2 = std::nullopt,
                       std::string_view codec = "tight");

}  // namespace bitsparse
