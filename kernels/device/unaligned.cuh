// Blocks that start somewhere in an aligned chunk of memory: they are read and written by aligned chunks all the same,
// and a lane takes the rest of its own from its neighbour.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bitsparse/format.h"
#include "device/ptx.cuh"
#include "device/slot_type.cuh"

namespace bitsparse::kernels {

__device__ __forceinline__ std::uint32_t offset_in_chunk(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) & (kChunkBytes - 1);
}

// Calls `work.template with<Words>()` for Words = offset / 4: branches that all threads take alike cost less than
// selecting words.
template <class Work>
__device__ __forceinline__ void with_word_offset(std::uint32_t offset, const Work& work) {
  if (offset & 8) return offset & 4 ? work.template with<3>() : work.template with<2>();
  return offset & 4 ? work.template with<1>() : work.template with<0>();
}

// Stores of an aligned chunk what begins, or ends, at byte 4 * Words + rest, by words where they are whole.
template <int Bytes, int Words>
__device__ __forceinline__ void store_from(void* chunk, const std::uint32_t (&words)[4], std::uint32_t rest) {
  auto* const to = static_cast<std::uint32_t*>(chunk);
#pragma unroll
  for (int j = Words + 1; j < 4; ++j) to[j] = words[j];
  if (Bytes == 4 || rest == 0) {
    to[Words] = words[Words];
  } else {
#pragma unroll
    for (std::uint32_t at = 0; at < 4; at += Bytes)
      if (at >= rest)
        reinterpret_cast<Slot<Bytes>*>(to + Words)[at / Bytes] = static_cast<Slot<Bytes>>(words[Words] >> 8 * at);
  }
}
template <int Bytes, int Words>
__device__ __forceinline__ void store_until(void* chunk, const std::uint32_t (&words)[4], std::uint32_t rest) {
  auto* const to = static_cast<std::uint32_t*>(chunk);
#pragma unroll
  for (int j = 0; j < Words; ++j) to[j] = words[j];
#pragma unroll
  for (std::uint32_t at = 0; at < 4; at += Bytes)
    if (at < rest)
      reinterpret_cast<Slot<Bytes>*>(to + Words)[at / Bytes] = static_cast<Slot<Bytes>>(words[Words] >> 8 * at);
}

// A block that starts somewhere in an aligned chunk, as the chunks it lies in: a lane's, and one past all others, of
// which the first lane knows.
template <int Bytes, int Chunks>
struct AlignedChunks {
  uint4 own[Chunks];
  uint4 past;
  std::uint32_t offset;  // of the block in its first chunk, in bytes

  template <bool Streaming>
  static __device__ __forceinline__ AlignedChunks load(const Slot<Bytes>* block, int lane) {
    AlignedChunks chunks;
    chunks.offset = offset_in_chunk(block);
    const uint4* const p = first_chunk(block, chunks.offset) + lane;
#pragma unroll
    for (int i = 0; i < Chunks; ++i) chunks.own[i] = Streaming ? load_streaming(p + i * kLanes) : p[i * kLanes];
    if (lane == 0) chunks.past = p[Chunks * kLanes];
    return chunks;
  }

  // Of a lane's i-th chunk what is the block's own, to a block of the same offset.
  __device__ __forceinline__ void store(int i, const uint4& v, Slot<Bytes>* block, int lane) const {
    uint4* const p = first_chunk(block, offset) + lane + i * kLanes;
    if (i == 0 && lane == 0)
      with_word_offset(offset, StorePart<true>{p, {v.x, v.y, v.z, v.w}, offset % 4});
    else
      *p = v;
  }
  // The same of the one past all others, by the first lane.
  __device__ __forceinline__ void store_past(const uint4& v, Slot<Bytes>* block) const {
    with_word_offset(offset,
                     StorePart<false>{first_chunk(block, offset) + Chunks * kLanes, {v.x, v.y, v.z, v.w}, offset % 4});
  }

  // Warp-wide: the chunks of the block as if it was aligned. The last lane's end where the first one's next begin.
  __device__ __forceinline__ void shift(uint4 (&v)[Chunks], int lane) const {
    with_word_offset(offset, Shift{*this, v, lane});
  }

 private:
  template <class T>
  static __device__ __forceinline__ auto* first_chunk(T* block, std::uint32_t offset) {
    using Chunk = std::conditional_t<std::is_const_v<T>, const uint4, uint4>;
    return reinterpret_cast<Chunk*>(reinterpret_cast<std::uintptr_t>(block) - offset);
  }

  template <bool From>
  struct StorePart {
    uint4* chunk;
    std::uint32_t words[4];
    std::uint32_t rest;
    template <int Words>
    __device__ __forceinline__ void with() const {
      if constexpr (From)
        store_from<Bytes, Words>(chunk, words, rest);
      else
        store_until<Bytes, Words>(chunk, words, rest);
    }
  };

  struct Shift {
    const AlignedChunks& from;
    uint4 (&to)[Chunks];
    int lane;
    template <int Words>
    __device__ __forceinline__ void with() const {
#pragma unroll
      for (int i = 0; i < Chunks; ++i) {
        const auto* const x = reinterpret_cast<const std::uint32_t*>(&from.own[i]);
        const auto* const next = reinterpret_cast<const std::uint32_t*>(i + 1 < Chunks ? &from.own[i + 1] : &from.past);
        std::uint32_t run[5 + Words];
#pragma unroll
        for (int j = 0; j < 4; ++j) run[j] = x[j];
#pragma unroll
        for (int j = 0; j <= Words; ++j)
          run[4 + j] = __shfl_sync(~0u, lane == 0 ? next[j] : x[j], (lane + 1) & (kLanes - 1));
        auto* const words = reinterpret_cast<std::uint32_t*>(&to[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = __funnelshift_r(run[Words + j], run[Words + j + 1], 8 * from.offset);
      }
    }
  };
};

// Writes a block's chunks, as if it was aligned, one after another from the first to the last.
template <int Bytes>
class ShiftedStores {
 public:
  // Warp-wide: the lane's i-th chunk, whose place is `own`.
  __device__ __forceinline__ void write(int i, const std::uint32_t (&words)[4], Slot<Bytes>* own, int lane) {
    const std::uint32_t offset = offset_in_chunk(own);
    auto* const chunk = reinterpret_cast<std::uint8_t*>(own) - offset;
    with_word_offset(offset, Write{last_, i, lane, chunk, words, offset});
  }

 private:
  // An aligned chunk begins with the end of the chunk before the lane's own, and takes the start of that. The block has
  // a part of its first and of its last one.
  struct Write {
    std::uint32_t (&last)[4];
    int i, lane;
    std::uint8_t* chunk;  // the aligned one
    const std::uint32_t (&words)[4];
    std::uint32_t offset;

    template <int Words>
    __device__ __forceinline__ void with() const {
      std::uint32_t run[6 + Words] = {};
#pragma unroll
      for (int j = 0; j <= Words; ++j) {
        std::uint32_t& before = last[3 - Words + j];
        const std::uint32_t own = words[3 - Words + j];
        run[j] = __shfl_sync(~0u, lane == kLanes - 1 ? before : own, (lane - 1) & (kLanes - 1));
        before = own;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) run[1 + Words + j] = words[j];
      std::uint32_t aligned[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) aligned[j] = __funnelshift_l(run[j], run[j + 1], 8 * offset);
      if (i == 0 && lane == 0)
        store_from<Bytes, Words>(chunk, aligned, offset % 4);
      else
        *reinterpret_cast<uint4*>(chunk) = make_uint4(aligned[0], aligned[1], aligned[2], aligned[3]);
      if (i == BlockLayout<Bytes>::kChunksPerLane - 1 && lane == kLanes - 1) {
        std::uint32_t rest[4] = {};
#pragma unroll
        for (int j = 0; j <= Words; ++j) rest[j] = __funnelshift_l(run[4 + j], run[5 + j], 8 * offset);
        store_until<Bytes, Words>(chunk + kChunkBytes, rest, offset % 4);
      }
    }
  };

  std::uint32_t last_[4];  // of the lane's chunk before
};

}  // namespace bitsparse::kernels
