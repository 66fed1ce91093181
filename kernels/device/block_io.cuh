// A lane's share of a block between global memory and registers.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/ptx.cuh"

namespace bitsparse::kernels {

template <int Bytes>
struct SlotType;
template <>
struct SlotType<1> {
  using type = std::uint8_t;
};
template <>
struct SlotType<2> {
  using type = std::uint16_t;
};
template <>
struct SlotType<4> {
  using type = std::uint32_t;
};
template <int Bytes>
using Slot = typename SlotType<Bytes>::type;

// Is tile `tile` inside a tensor of `numel` elements, and `base` aligned for 16-byte accesses? Tiles that are not take
// a path of their own.
template <int Bytes>
__device__ __forceinline__ bool tile_is_whole(const void* base, std::int64_t tile, std::int64_t numel) {
  return (reinterpret_cast<std::uintptr_t>(base) & (kChunkBytes - 1)) == 0 &&
         (tile + 1) * BlockLayout<Bytes>::kTileElements <= numel;
}

// The lane's i-th chunk as words, elements past the end as zero.
template <int Bytes, bool Whole, bool Streaming>
__device__ __forceinline__ uint4 load_chunk(const void* base, std::int64_t first, std::int64_t numel, int lane, int i) {
  using L = BlockLayout<Bytes>;
  const Slot<Bytes>* elements = static_cast<const Slot<Bytes>*>(base) + first;
  if constexpr (Whole) {
    const uint4* p = reinterpret_cast<const uint4*>(elements) + lane + i * kLanes;
    return Streaming ? load_streaming(p) : *p;
  }
  const std::int64_t left = numel - first;
  std::uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    words[j] = 0;
#pragma unroll
    for (int k = 0; k < 4 / Bytes; ++k) {
      const int e = (lane + kLanes * i) * L::kChunkElements + j * (4 / Bytes) + k;
      if (e < left) words[j] |= static_cast<std::uint32_t>(elements[e]) << (k * L::kBits % 32);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The lane's chunks from Begin to End.
template <int Bytes, bool Whole, bool Streaming, int Begin, int End, int Chunks>
__device__ __forceinline__ void load_chunks(const void* base, std::int64_t first, std::int64_t numel, int lane,
                                            uint4 (&v)[Chunks]) {
#pragma unroll
  for (int i = Begin; i < End; ++i) v[i] = load_chunk<Bytes, Whole, Streaming>(base, first, numel, lane, i);
}

// Writes the lane's i-th chunk.
template <int Bytes, bool Whole, bool Streaming>
__device__ __forceinline__ void store_chunk(void* base, std::int64_t first, std::int64_t numel, int lane, int i,
                                            const std::uint32_t (&words)[4]) {
  using L = BlockLayout<Bytes>;
  Slot<Bytes>* elements = static_cast<Slot<Bytes>*>(base) + first;
  if constexpr (Whole) {
    uint4* p = reinterpret_cast<uint4*>(elements) + lane + i * kLanes;
    const uint4 v = make_uint4(words[0], words[1], words[2], words[3]);
    if constexpr (Streaming)
      __stcs(p, v);
    else
      *p = v;
    return;
  }
  const std::int64_t left = numel - first;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int k = 0; k < 4 / Bytes; ++k) {
      const int e = (lane + kLanes * i) * L::kChunkElements + j * (4 / Bytes) + k;
      if (e < left) elements[e] = static_cast<Slot<Bytes>>(words[j] >> (k * L::kBits % 32));
    }
}

}  // namespace bitsparse::kernels
