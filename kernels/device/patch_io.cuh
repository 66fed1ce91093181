// A lane's share of a block of geometry `patch` between global memory and registers.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"

namespace bitsparse::kernels {

// The lane's chunks, of which each is four rows below the one before.
class PatchChunks {
 public:
  // `row`, `column`: of the block's first element in a matrix of `columns` columns at `base`, aligned to 16 bytes.
  __device__ __forceinline__ PatchChunks(void* base, std::int64_t row, std::int64_t column, std::int64_t columns,
                                         int lane)
      : first_(static_cast<std::uint8_t*>(base) + 2 * ((row + lane / Patch::kRowChunks) * columns + column) +
               kChunkBytes * (lane % Patch::kRowChunks)),
        stride_(2 * columns * (kLanes / Patch::kRowChunks)) {}

  __device__ __forceinline__ uint4 load(int i) const { return *chunk(i); }
  __device__ __forceinline__ void write(int i, const std::uint32_t (&words)[4]) const {
    *chunk(i) = make_uint4(words[0], words[1], words[2], words[3]);
  }

 private:
  __device__ __forceinline__ uint4* chunk(int i) const { return reinterpret_cast<uint4*>(first_ + i * stride_); }

  std::uint8_t* first_;
  std::int64_t stride_;  // bytes
};

}  // namespace bitsparse::kernels
