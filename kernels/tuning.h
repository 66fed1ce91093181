// Launch parameters found by measurement. Occupancy is thread blocks per multiprocessor that a kernel is compiled for.
#pragma once

#include "bitsparse/format.h"

namespace bitsparse::kernels {

struct Tuning {
  // 48 warps an SM for 1- and 2-byte elements: 40 registers a thread. 4-byte elements hold twice the data in registers:
  // 24 warps. Measured on sm_90; sm_80 has the same registers and less shared memory, which then limits the count by
  // itself.
  static constexpr int warps(DType dtype) { return element_bytes(dtype) == 4 ? 24 : 48; }
  static constexpr int compress_blocks(DType dtype) { return warps(dtype) / blocks_per_tile(dtype); }
  static constexpr int restore_blocks(DType dtype) { return warps(dtype) / blocks_per_tile(dtype); }
};

}  // namespace bitsparse::kernels
