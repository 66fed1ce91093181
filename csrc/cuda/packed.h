// Packed tensors on a CUDA device.
#pragma once

#include <ATen/core/TensorBody.h>

#include "bitsparse/format.h"

namespace bitsparse::cuda {

// As in cpu/codec.h; the host waits for the size, and once more for the header's upload.
at::Tensor pack(const at::Tensor& contiguous, DType dtype, Codec codec, Keep keep);
// `header` is that of `packed`, which has passed cpu::validate.
void unpack(const at::Tensor& packed, const PackedHeader& header, const at::Tensor& out);

}  // namespace bitsparse::cuda
