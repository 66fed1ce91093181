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

// A block of memory that starts anywhere, as the aligned chunks that it lies in.
struct Alignment {
  std::uint32_t offset;  // of the block in its first aligned chunk, in bytes
  bool by_chunks;        // all its aligned chunks end inside the tensor; else it is accessed by elements
};

template <int Bytes>
__device__ __forceinline__ Alignment alignment_of(const void* base, std::int64_t first, std::int64_t numel) {
  const std::uint32_t offset = reinterpret_cast<std::uintptr_t>(base) & (kChunkBytes - 1);
  const std::int64_t past_block = (offset ? kChunkBytes - offset : 0) / Bytes;
  return {offset, first + BlockLayout<Bytes>::kBlockElements + past_block <= numel};
}

// Four words of two neighbouring chunks, from the one numbered `word` (0 to 3) on, and the word after them.
__device__ __forceinline__ void window(const std::uint32_t (&chunks)[8], std::uint32_t word, std::uint32_t (&five)[5]) {
  std::uint32_t six[6];
#pragma unroll
  for (int j = 0; j < 6; ++j) six[j] = word & 2 ? chunks[j + 2] : chunks[j];
#pragma unroll
  for (int j = 0; j < 5; ++j) five[j] = word & 1 ? six[j + 1] : six[j];
}

// The lane's i-th chunk as words, elements past the end as zero.
template <int Bytes, bool Whole, bool Streaming>
__device__ __forceinline__ uint4 load_chunk(const void* base, std::int64_t first, std::int64_t numel, int lane, int i) {
  using L = BlockLayout<Bytes>;
  const Slot<Bytes>* elements = static_cast<const Slot<Bytes>*>(base) + first;
  const int chunk = lane + i * kLanes;
  if constexpr (Whole) {
    const uint4* p = reinterpret_cast<const uint4*>(elements) + chunk;
    return Streaming ? load_streaming(p) : *p;
  }
  std::uint32_t words[4] = {};
  const Alignment alignment = alignment_of<Bytes>(base, first, numel);
  if (alignment.by_chunks) {
    const auto start = reinterpret_cast<std::uintptr_t>(elements) - alignment.offset;
    const uint4* p = reinterpret_cast<const uint4*>(start) + chunk;
    const uint4 low = *p;
    uint4 high = make_uint4(__shfl_down_sync(~0u, low.x, 1), __shfl_down_sync(~0u, low.y, 1),
                            __shfl_down_sync(~0u, low.z, 1), __shfl_down_sync(~0u, low.w, 1));
    if (lane == kLanes - 1 && alignment.offset) high = p[1];
    const std::uint32_t chunks[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    std::uint32_t five[5];
    window(chunks, alignment.offset / 4, five);
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = __funnelshift_r(five[j], five[j + 1], 8 * alignment.offset);
  } else {
    const std::int64_t left = numel - first;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int k = 0; k < 4 / Bytes; ++k) {
        const int e = chunk * L::kChunkElements + j * (4 / Bytes) + k;
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

// Writes a lane's chunks, one after another from the first to the last.
template <int Bytes, bool Whole, bool Streaming>
class ChunkWriter {
  using L = BlockLayout<Bytes>;

 public:
  __device__ __forceinline__ ChunkWriter(void* base, std::int64_t first, std::int64_t numel, int lane)
      : base_(base), first_(first), numel_(numel), lane_(lane) {}

  // Warp-wide.
  __device__ __forceinline__ void write(int i, const std::uint32_t (&words)[4]) {
    Slot<Bytes>* const elements = static_cast<Slot<Bytes>*>(base_) + first_;
    const int chunk = lane_ + i * kLanes;
    if constexpr (Whole) {
      uint4* p = reinterpret_cast<uint4*>(elements) + chunk;
      const uint4 v = make_uint4(words[0], words[1], words[2], words[3]);
      if constexpr (Streaming)
        __stcs(p, v);
      else
        *p = v;
    } else {
      Slot<Bytes>* const own = elements + chunk * L::kChunkElements;
      const Alignment alignment = alignment_of<Bytes>(base_, first_, numel_);
      if (alignment.by_chunks)
        write_shifted(i, own, alignment.offset, words);
      else
        write_elements(own, words, 0, numel_ - first_ - chunk * L::kChunkElements);
    }
  }

 private:
  // An aligned chunk begins with the end of the chunk before the lane's own, and takes the start of that.
  __device__ __forceinline__ void write_shifted(int i, Slot<Bytes>* own, std::uint32_t offset,
                                                const std::uint32_t (&words)[4]) {
    const std::int64_t own_in_first = (kChunkBytes - offset) / Bytes;
    std::uint32_t chunks[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      chunks[j] = __shfl_sync(~0u, lane_ == kLanes - 1 ? last_[j] : words[j], (lane_ - 1) & (kLanes - 1));
      chunks[j + 4] = words[j];
      last_[j] = words[j];
    }
    if (i == 0 && lane_ == 0) {
      write_elements(own, words, 0, own_in_first);
    } else {
      std::uint32_t five[5];
      window(chunks, 3 - offset / 4, five);
#pragma unroll
      for (int j = 0; j < 4; ++j) five[j] = __funnelshift_l(five[j], five[j + 1], 8 * offset);
      *reinterpret_cast<uint4*>(reinterpret_cast<std::uintptr_t>(own) - offset) =
          make_uint4(five[0], five[1], five[2], five[3]);
    }
    if (i == L::kChunksPerLane - 1 && lane_ == kLanes - 1) write_elements(own, words, own_in_first, L::kChunkElements);
  }

  // Those of a chunk's elements that are in [begin, end).
  static __device__ __forceinline__ void write_elements(Slot<Bytes>* chunk, const std::uint32_t (&words)[4],
                                                        std::int64_t begin, std::int64_t end) {
#pragma unroll
    for (int e = 0; e < L::kChunkElements; ++e)
      if (e >= begin && e < end) chunk[e] = static_cast<Slot<Bytes>>(words[e * Bytes / 4] >> (e * L::kBits % 32));
  }

  void* base_;
  std::int64_t first_, numel_;
  int lane_;
  std::uint32_t last_[4] = {};  // of the chunk written last
};

}  // namespace bitsparse::kernels
