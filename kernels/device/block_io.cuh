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

// Where a warp's block lies in a tensor, and whether whole 16-byte accesses may be used.
struct BlockSpan {
  std::int64_t first;  // index of the block's first element
  std::int64_t numel;
  bool whole;  // inside the tensor and 16-byte aligned
};

template <int Bytes>
__device__ __forceinline__ BlockSpan block_span(const void* base, std::int64_t block, std::int64_t numel) {
  const std::int64_t first = block * kBlockElements;
  const bool aligned = (reinterpret_cast<std::uintptr_t>(base) & (kChunkBytes - 1)) == 0;
  return {first, numel, aligned && first + kBlockElements <= numel};
}

// The lane's 32 elements as words, elements past the end as zero.
template <int Bytes, bool Streaming>
__device__ __forceinline__ void load_block(const void* base, const BlockSpan& span, int lane,
                                           uint4 (&v)[BlockLayout<Bytes>::kChunksPerLane]) {
  using L = BlockLayout<Bytes>;
  const Slot<Bytes>* elements = static_cast<const Slot<Bytes>*>(base) + span.first;
  if (span.whole) {
    const uint4* p = reinterpret_cast<const uint4*>(elements) + lane;
#pragma unroll
    for (int i = 0; i < L::kChunksPerLane; ++i) v[i] = Streaming ? load_streaming(p + i * kLanes) : p[i * kLanes];
    return;
  }
  const std::int64_t left = span.numel - span.first;
#pragma unroll
  for (int i = 0; i < L::kChunksPerLane; ++i) {
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
    v[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Writes the lane's i-th chunk.
template <int Bytes, bool Streaming>
__device__ __forceinline__ void store_chunk(void* base, const BlockSpan& span, int lane, int i, const std::uint32_t (&words)[4]) {
  using L = BlockLayout<Bytes>;
  Slot<Bytes>* elements = static_cast<Slot<Bytes>*>(base) + span.first;
  if (span.whole) {
    uint4* p = reinterpret_cast<uint4*>(elements) + lane + i * kLanes;
    const uint4 v = make_uint4(words[0], words[1], words[2], words[3]);
    if constexpr (Streaming)
      __stcs(p, v);
    else
      *p = v;
    return;
  }
  const std::int64_t left = span.numel - span.first;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int k = 0; k < 4 / Bytes; ++k) {
      const int e = (lane + kLanes * i) * L::kChunkElements + j * (4 / Bytes) + k;
      if (e < left) elements[e] = static_cast<Slot<Bytes>>(words[j] >> (k * L::kBits % 32));
    }
}

}  // namespace bitsparse::kernels
