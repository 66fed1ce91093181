// A lane's share of a block between global memory and registers.
#pragma once

#include <cstdint>
#include <type_traits>

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

// How a tile's elements are accessed. What is rare is code of its own, not to cost the others a register.
enum class Access {
  whole,     // by aligned chunks: all are in the tensor
  shifted,   // the same, but the tile begins somewhere in a chunk
  elements,  // one by one: the tensor ends in the tile, or within a chunk after it
};

__device__ __forceinline__ std::uint32_t offset_in_chunk(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) & (kChunkBytes - 1);
}

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
    return;
  }
#pragma unroll
  for (std::uint32_t at = Bytes; at < 4; at += Bytes)
    if (at >= rest)
      reinterpret_cast<Slot<Bytes>*>(to + Words)[at / Bytes] = static_cast<Slot<Bytes>>(words[Words] >> 8 * at);
}
template <int Bytes, int Words>
__device__ __forceinline__ void store_until(void* chunk, const std::uint32_t (&words)[4], std::uint32_t rest) {
  auto* const to = static_cast<std::uint32_t*>(chunk);
#pragma unroll
  for (int j = 0; j < Words; ++j) to[j] = words[j];
#pragma unroll
  for (std::uint32_t at = 0; at + Bytes < 4; at += Bytes)
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
    with_word_offset(
        offset, StorePart<false>{first_chunk(block, offset) + Chunks * kLanes, {v.x, v.y, v.z, v.w}, offset % 4});
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

// The lane's chunks from Begin to End as words, elements past the end as zero.
template <int Bytes, Access A, bool Streaming, int Begin, int End, int Chunks>
__device__ __forceinline__ void load_chunks(const void* base, std::int64_t first, std::int64_t numel, int lane,
                                            uint4 (&v)[Chunks]) {
  using L = BlockLayout<Bytes>;
  const Slot<Bytes>* const elements = static_cast<const Slot<Bytes>*>(base) + first;
  if constexpr (Begin == End) return;
  else if constexpr (A == Access::whole) {
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
      uint4* const p = reinterpret_cast<uint4*>(elements_) + lane_ + i * kLanes;
      const uint4 v = make_uint4(words[0], words[1], words[2], words[3]);
      if constexpr (Streaming)
        __stcs(p, v);
      else
        *p = v;
    }
    if constexpr (A == Access::shifted) {
      const std::uint32_t offset = offset_in_chunk(own);
      auto* const chunk = reinterpret_cast<std::uint8_t*>(own) - offset;
      with_word_offset(offset, ShiftedWrite{*this, i, chunk, words, offset});
    }
  }

 private:
  // An aligned chunk begins with the end of the chunk before the lane's own, and takes the start of that. The block has
  // a part of its first and of its last one.
  struct ShiftedWrite {
    ChunkWriter& writer;
    int i;
    std::uint8_t* chunk;  // the aligned one
    const std::uint32_t (&words)[4];
    std::uint32_t offset;

    template <int Words>
    __device__ __forceinline__ void with() const {
      const int lane = writer.lane_;
      std::uint32_t run[6 + Words] = {};
#pragma unroll
      for (int j = 0; j <= Words; ++j) {
        std::uint32_t& last = writer.last_[3 - Words + j];
        const std::uint32_t own = words[3 - Words + j];
        run[j] = __shfl_sync(~0u, lane == kLanes - 1 ? last : own, (lane - 1) & (kLanes - 1));
        last = own;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) run[1 + Words + j] = words[j];
      std::uint32_t aligned[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) aligned[j] = __funnelshift_l(run[j], run[j + 1], 8 * offset);
      if (i == 0 && lane == 0)
        store_from<Bytes, Words>(chunk, aligned, offset % 4);
      else
        store(chunk, aligned);
      if (i == L::kChunksPerLane - 1 && lane == kLanes - 1) {
        std::uint32_t rest[4] = {};
#pragma unroll
        for (int j = 0; j <= Words; ++j) rest[j] = __funnelshift_l(run[4 + j], run[5 + j], 8 * offset);
        store_until<Bytes, Words>(chunk + kChunkBytes, rest, offset % 4);
      }
    }
  };

  static __device__ __forceinline__ void store(void* to, const std::uint32_t (&words)[4]) {
    const uint4 v = make_uint4(words[0], words[1], words[2], words[3]);
    if constexpr (Streaming)
      __stcs(static_cast<uint4*>(to), v);
    else
      *static_cast<uint4*>(to) = v;
  }

  Slot<Bytes>* elements_;
  std::int64_t left_;
  int lane_;
  std::uint32_t last_[4];  // of the chunk written last
};

}  // namespace bitsparse::kernels
