// Launch parameters found by measurement. Occupancy is thread blocks per multiprocessor that a kernel is compiled for.
#pragma once

#include "bitsparse/format.h"

namespace bitsparse::kernels {

struct Tuning {
  // 48 warps an SM for 2-byte elements: 40 registers, 33 KiB of shared memory a block. 4-byte elements hold twice the data in
  // registers. Measured on sm_90; sm_80 has the same registers and less shared memory, which then limits the count by itself.
  static constexpr int compress_blocks(DType dtype) { return element_bytes(dtype) == 4 ? 6 : 6; }
  static constexpr int restore_blocks(DType dtype) { return element_bytes(dtype) == 4 ? 6 : 6; }
};

}  // namespace bitsparse::kernels
