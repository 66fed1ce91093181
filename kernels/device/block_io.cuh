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

// How a tile's elements are accessed. What is rare is code of its own, not to cost the others a register.
enum class Access {
  whole,     // by aligned chunks: all are in the tensor
  shifted,   // the same, but the tile begins somewhere in a chunk
  elements,  // one by one: the tensor ends in the tile, or within a chunk after it
};

// `address`: of the tensor; of several, all their bits.
template <int Bytes>
__device__ __forceinline__ bool tile_is_whole(std::uintptr_t address, std::int64_t tile, std::int64_t numel) {
  return (address & (kChunkBytes - 1)) == 0 && (tile + 1) * BlockLayout<Bytes>::kTileElements <= numel;
}
// Of another tile: can it be `shifted`? An aligned one that is not whole can't.
template <int Bytes>
__device__ __forceinline__ bool tile_may_shift(std::int64_t tile, std::int64_t numel) {
  using L = BlockLayout<Bytes>;
  return (tile + 1) * L::kTileElements + L::kChunkElements <= numel;
}

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

// Warp-wide: makes of aligned chunks those that start `offset` bytes later. The last lane's end where the first one's
// next ones begin; `past` is the first lane's, after all others.
template <int Begin, int End, int Chunks>
struct ShiftOnLoad {
  uint4 (&chunks)[Chunks];
  const uint4& past;
  std::uint32_t offset;
  int lane;
  template <int Words>
  __device__ __forceinline__ void with() const {
#pragma unroll
    for (int i = Begin; i < End; ++i) {
      auto* const x = reinterpret_cast<std::uint32_t*>(&chunks[i]);
      const auto* const next = reinterpret_cast<const std::uint32_t*>(i + 1 < End ? &chunks[i + 1] : &past);
      std::uint32_t run[5 + Words];
#pragma unroll
      for (int j = 0; j < 4; ++j) run[j] = x[j];
#pragma unroll
      for (int j = 0; j <= Words; ++j)
        run[4 + j] = __shfl_sync(~0u, lane == 0 ? next[j] : x[j], (lane + 1) & (kLanes - 1));
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = __funnelshift_r(run[Words + j], run[Words + j + 1], 8 * offset);
    }
  }
};

// The lane's chunks from Begin to End as words, elements past the end as zero.
template <int Bytes, Access A, bool Streaming, int Begin, int End, int Chunks>
__device__ __forceinline__ void load_chunks(const void* base, std::int64_t first, std::int64_t numel, int lane,
                                            uint4 (&v)[Chunks]) {
  using L = BlockLayout<Bytes>;
  if constexpr (Begin == End) return;
  const Slot<Bytes>* const elements = static_cast<const Slot<Bytes>*>(base) + first;
  if constexpr (A == Access::elements) {
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
  } else {
    const std::uint32_t offset = A == Access::whole ? 0 : offset_in_chunk(elements);
    const auto* const p = reinterpret_cast<const uint4*>(reinterpret_cast<std::uintptr_t>(elements) - offset) + lane;
#pragma unroll
    for (int i = Begin; i < End; ++i) v[i] = Streaming ? load_streaming(p + i * kLanes) : p[i * kLanes];
    if (offset) {
      uint4 past;
      if (lane == 0) past = p[End * kLanes];
      with_word_offset(offset, ShiftOnLoad<Begin, End, Chunks>{v, past, offset, lane});
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
    const std::uint32_t offset = A == Access::whole ? 0 : offset_in_chunk(own);
    if (offset) {
      auto* const chunk = reinterpret_cast<std::uint8_t*>(own) - offset;
      with_word_offset(offset, ShiftedWrite{*this, i, chunk, words, offset});
    } else {
      store(own, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }

 private:
  // An aligned chunk begins with the end of the chunk before the lane's own, and takes the start of that. Of the
  // block's first and last aligned chunk others have a part: words, and what of a word is left.
  struct ShiftedWrite {
    ChunkWriter& writer;
    int i;
    std::uint8_t* chunk;  // the aligned one
    const std::uint32_t (&words)[4];
    std::uint32_t offset;

    template <int Words>
    __device__ __forceinline__ void with() const {
      const int lane = writer.lane_;
      std::uint32_t run[6 + Words];
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
      if (i == 0 && lane == 0) {
        write_bytes(Words, aligned[Words], offset % 4, 4);
#pragma unroll
        for (int j = Words + 1; j < 4; ++j) write_bytes(j, aligned[j], 0, 4);
      } else {
        store(chunk, make_uint4(aligned[0], aligned[1], aligned[2], aligned[3]));
      }
      if (i == L::kChunksPerLane - 1 && lane == kLanes - 1) {
        std::uint8_t* const next = chunk + kChunkBytes;
#pragma unroll
        for (int j = 0; j < Words; ++j)
          *reinterpret_cast<std::uint32_t*>(next + 4 * j) =
              __funnelshift_l(words[3 - Words + j], words[4 - Words + j], 8 * offset);
        ShiftedWrite{writer, i, next, words, offset}.write_bytes(Words, __funnelshift_l(words[3], 0, 8 * offset), 0,
                                                                 offset % 4);
      }
    }

    // Of the chunk's j-th word the bytes in [begin, end).
    __device__ __forceinline__ void write_bytes(int j, std::uint32_t word, std::uint32_t begin,
                                                std::uint32_t end) const {
      std::uint8_t* const to = chunk + 4 * j;
      if (begin == 0 && end == 4) {
        *reinterpret_cast<std::uint32_t*>(to) = word;
        return;
      }
#pragma unroll
      for (std::uint32_t byte = 0; byte < 4; byte += Bytes)
        if (byte >= begin && byte < end)
          *reinterpret_cast<Slot<Bytes>*>(to + byte) = static_cast<Slot<Bytes>>(word >> 8 * byte);
    }
  };

  static __device__ __forceinline__ void store(void* to, const uint4& v) {
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
