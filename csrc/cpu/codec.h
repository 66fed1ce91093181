// Packed tensors on the CPU: the format of docs/format.md, exact and canonical.
#pragma once

#include <ATen/core/TensorBody.h>

#include "bitsparse/format.h"

namespace bitsparse::cpu {

// Encodes a contiguous CPU tensor whose elements have the size of `dtype`. Returns a one-dimensional uint8 CPU tensor
// of exactly the packed size. Uses at::get_num_threads() threads; the result doesn't depend on their number.
at::Tensor pack(const at::Tensor& contiguous, DType dtype, Codec codec, Keep keep);

// Decodes to `out`: numel elements of the header's dtype, at any alignment. `packed` has passed validate(); with a
// shallow one that is enough: whatever the payload says, nothing is read or written out of bounds. A payload that is no
// valid encoding throws c10::Error; `out` is then partly written.
void unpack(const at::Tensor& packed, void* out);

// Throws c10::Error that says what was expected and what came. Shallow: the header, the tile table's place and the
// sizes. Deep: also every tile entry, block header, mask and body, that is, all that unpack checks.
PackedHeader validate(const at::Tensor& packed, bool deep);

}  // namespace bitsparse::cpu
