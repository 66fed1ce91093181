// Any tensor, losslessly compressed and self-contained.
#pragma once

#include <ATen/core/TensorBody.h>

#include <string_view>

namespace bitsparse {

// Compresses a tensor of BF16, FP16, FP32, FP8 e4m3fn or FP8 e5m2 to its packed form (docs/format.md): a uint8 vector
// on the same device, of exactly the size needed, the same bytes on every device. keep "nonzero" restores every bit;
// "positive" restores relu(t), NaNs included. On CUDA the host waits once or twice, as the size is known only on the
// device.
at::Tensor pack(const at::Tensor& t, std::string_view codec = "tight", std::string_view keep = "nonzero");

// The tensor of a packed form. `validated`: the bytes come from `pack` and are not checked again (a check of CUDA data
// waits and copies).
at::Tensor unpack(const at::Tensor& packed, at::IntArrayRef size, at::ScalarType dtype, bool validated = false);

}  // namespace bitsparse
