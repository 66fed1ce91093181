// Errors for what a caller can get wrong: each names the argument, what was expected and what came.
#pragma once

#include <ATen/core/TensorBody.h>

#include <optional>

namespace bitsparse {

// h (..., d_ff), w2 (d_out, d_ff), b2 (d_out).
void check_linear(const char* op, const at::Tensor& h, const at::Tensor& w2, const std::optional<at::Tensor>& b2);
// x (..., d_model), w1 (d_ff, d_model), b1 (d_ff), w2 (d_out, d_ff), b2 (d_out).
void check_ffn(const char* op, const at::Tensor& x, const at::Tensor& w1, const std::optional<at::Tensor>& b1,
               const at::Tensor& w2, const std::optional<at::Tensor>& b2);

}  // namespace bitsparse
