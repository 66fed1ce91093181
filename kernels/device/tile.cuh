// Which part of the tensor a thread block, and each of its warps, works on.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"

namespace bitsparse::kernels {

// From the end of the tensor: a matrix product that wrote it has left its last rows in L2, and one that reads it next
// finds its first rows there.
__device__ __forceinline__ std::uint32_t this_tile() { return gridDim.x - 1 - blockIdx.x; }

// The first element of a warp's block.
template <int Bytes>
__device__ __forceinline__ std::int64_t first_of_block(int warp) {
  using L = BlockLayout<Bytes>;
  return (static_cast<std::int64_t>(this_tile()) * L::kBlocksPerTile + warp) * L::kBlockElements;
}

}  // namespace bitsparse::kernels
