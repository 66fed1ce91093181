// A lane's share of a block between global memory and registers.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/ptx.cuh"
#include "device/slot_type.cuh"
#include "device/unaligned.cuh"

namespace bitsparse::kernels {

// How a tile's elements are accessed. What is rare is code of its own, not to cost the others a register.
enum class Access {
  whole,     // by aligned chunks: all are in the tensor
  shifted,   // the same, but the tile begins somewhere in a chunk
  elements,  // one by one: the tensor ends in the tile, or within a chunk after it
};

// Is tile `tile` inside a tensor of `numel` elements, and are `addresses`, the bits of one or of several, aligned? No
// branch but the caller's.
template <int Bytes>
__device__ __forceinline__ bool tile_is_whole(std::uintptr_t addresses, std::int64_t tile, std::int64_t numel) {
  return ((addresses & (kChunkBytes - 1)) == 0) & ((tile + 1) * BlockLayout<Bytes>::kTileElements <= numel);
}
// Is it inside with all aligned chunks that it has a part in?
template <int Bytes>
__device__ __forceinline__ bool tile_may_shift(std::int64_t tile, std::int64_t numel) {
  using L = BlockLayout<Bytes>;
  return (tile + 1) * L::kTileElements + L::kChunkElements <= numel;
}

// The lane's chunks from Begin to End as words, elements past the end as zero.
template <int Bytes, Access A, bool Streaming, int Begin, int End, int Chunks>
__device__ __forceinline__ void load_chunks(const void* base, std::int64_t first, std::int64_t numel, int lane,
                                            uint4 (&v)[Chunks]) {
  using L = BlockLayout<Bytes>;
  const Slot<Bytes>* const elements = static_cast<const Slot<Bytes>*>(base) + first;
  if constexpr (Begin == End) {
    return;
  } else if constexpr (A == Access::whole) {
    const uint4* const p = reinterpret_cast<const uint4*>(elements) + lane;
#pragma unroll
    for (int i = Begin; i < End; ++i) v[i] = Streaming ? load_streaming(p + i * kLanes) : p[i * kLanes];
  } else if constexpr (A == Access::shifted) {
    uint4 part[End - Begin];
    AlignedChunks<Bytes, End - Begin>::template load<Streaming>(elements + Begin * kLanes * L::kChunkElements, lane)
        .shift(part, lane);
#pragma unroll
    for (int i = Begin; i < End; ++i) v[i] = part[i - Begin];
  } else {
    const std::int64_t left = numel - first;
#pragma unroll
    for (int i = Begin; i < End; ++i) {
      std::uint32_t words[4] = {};
#pragma unroll
      for (int e = 0; e < L::kChunkElements; ++e) {
        const int at = (lane + i * kLanes) * L::kChunkElements + e;
        if (at < left) words[e * Bytes / 4] |= static_cast<std::uint32_t>(elements[at]) << (e * L::kBits % 32);
      }
      v[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Writes a lane's chunks, one after another from the first to the last.
template <int Bytes, Access A, bool Streaming>
class ChunkWriter {
  using L = BlockLayout<Bytes>;

 public:
  __device__ __forceinline__ ChunkWriter(void* base, std::int64_t first, std::int64_t numel, int lane)
      : elements_(static_cast<Slot<Bytes>*>(base) + first), left_(numel - first), lane_(lane) {}

  // Warp-wide.
  __device__ __forceinline__ void write(int i, const std::uint32_t (&words)[4]) {
    const int first = (lane_ + i * kLanes) * L::kChunkElements;
    Slot<Bytes>* const own = elements_ + first;
    if constexpr (A == Access::elements) {
#pragma unroll
      for (int e = 0; e < L::kChunkElements; ++e)
        if (first + e < left_) own[e] = static_cast<Slot<Bytes>>(words[e * Bytes / 4] >> (e * L::kBits % 32));
      return;
    }
    if constexpr (A == Access::whole) {
      // Written out here: behind a function that others share, compilers take the store apart (docs/performance.md).
      uint4* const p = reinterpret_cast<uint4*>(elements_) + lane_ + i * kLanes;
      const uint4 v = make_uint4(words[0], words[1], words[2], words[3]);
      if constexpr (Streaming)
        __stcs(p, v);
      else
        *p = v;
    }
    if constexpr (A == Access::shifted) shifted_.write(i, words, own, lane_);
  }

 private:
  Slot<Bytes>* elements_;
  std::int64_t left_;
  int lane_;
  ShiftedStores<Bytes> shifted_;
};

}  // namespace bitsparse::kernels
