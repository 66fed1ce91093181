// The internal ops, called through the dispatcher so that tracing sees them.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace bitsparse::ops {

at::Tensor compress_activation_(at::Tensor h, std::string_view activation, std::string_view codec);
std::tuple<at::Tensor, at::Tensor> compress_activation(const at::Tensor& h, std::string_view activation,
                                                       std::string_view codec);
std::tuple<at::Tensor, at::Tensor> linear_compress(const at::Tensor& x, const at::Tensor& w,
                                                   const std::optional<at::Tensor>& bias, std::string_view activation,
                                                   std::string_view codec);
at::Tensor restore_activation(const at::Tensor& lease, c10::SymIntArrayRef size, at::ScalarType dtype,
                              std::string_view activation);
at::Tensor linear_gradient(const at::Tensor& grad, const at::Tensor& w, const at::Tensor& lease,
                           std::string_view activation);
void activation_gradient_(at::Tensor grad, const at::Tensor& lease, std::string_view activation);

}  // namespace bitsparse::ops
