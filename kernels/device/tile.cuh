// Which tile of the tensor a thread block works on.
#pragma once

#include <cstdint>

namespace bitsparse::kernels {

// From the end of the tensor: a matrix product that wrote it has left its last rows in L2, and one that reads it next
// finds its first rows there.
__device__ __forceinline__ std::uint32_t this_tile() { return gridDim.x - 1 - blockIdx.x; }

}  // namespace bitsparse::kernels
