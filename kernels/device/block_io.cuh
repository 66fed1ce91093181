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

// Calls `work.template with<Words>()` for Words = offset / 4: branches that all threads take alike cost less than
// selecting words.
template <class Work>
__device__ __forceinline__ void with_word_offset(std::uint32_t offset, const Work& work) {
  if (offset & 8) return offset & 4 ? work.template with<3>() : work.template with<2>();
  return offset & 4 ? work.template with<1>() : work.template with<0>();
}

// Warp-wide: makes of aligned chunks those that start `offset` bytes later. The last lane's end where the first one's
// next ones begin; `past` is the first lane's, after all others.
template <int Chunks>
struct ShiftOnLoad {
  uint4 (&chunks)[Chunks];
  const uint4& past;
  std::uint32_t offset;
  int lane;
  template <int Words>
  __device__ __forceinline__ void with() const {
#pragma unroll
    for (int i = 0; i < Chunks; ++i) {
      std::uint32_t* const x = reinterpret_cast<std::uint32_t*>(&chunks[i]);
      const auto* const next = reinterpret_cast<const std::uint32_t*>(i + 1 < Chunks ? &chunks[i + 1] : &past);
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
template <int Bytes, bool Whole, bool Streaming, int Begin, int End, int Chunks>
__device__ __forceinline__ void load_chunks(const void* base, std::int64_t first, std::int64_t numel, int lane,
                                            uint4 (&v)[Chunks]) {
  using L = BlockLayout<Bytes>;
  if constexpr (Begin < End) {
    const Slot<Bytes>* elements = static_cast<const Slot<Bytes>*>(base) + first;
    const Alignment alignment = Whole ? Alignment{0, true} : alignment_of<Bytes>(base, first, numel);
    if (alignment.by_chunks) {
      const auto* const p =
          reinterpret_cast<const uint4*>(reinterpret_cast<std::uintptr_t>(elements) - alignment.offset) + lane;
      uint4 part[End - Begin], past;
#pragma unroll
      for (int i = Begin; i < End; ++i) part[i - Begin] = Streaming ? load_streaming(p + i * kLanes) : p[i * kLanes];
      if (alignment.offset) {
        if (lane == 0) past = p[End * kLanes];
        with_word_offset(alignment.offset, ShiftOnLoad<End - Begin>{part, past, alignment.offset, lane});
      }
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
  struct ShiftOnStore {
    ChunkWriter& writer;
    const std::uint32_t (&words)[4];
    std::uint32_t (&aligned)[4];
    std::uint32_t offset;
    template <int Words>
    __device__ __forceinline__ void with() const {
      std::uint32_t run[5 + Words];
#pragma unroll
      for (int j = 0; j <= Words; ++j) {
        std::uint32_t& last = writer.last_[3 - Words + j];
        const std::uint32_t own = words[3 - Words + j];
        run[j] = __shfl_sync(~0u, writer.lane_ == kLanes - 1 ? last : own, (writer.lane_ - 1) & (kLanes - 1));
        last = own;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) run[1 + Words + j] = words[j];
#pragma unroll
      for (int j = 0; j < 4; ++j) aligned[j] = __funnelshift_l(run[j], run[j + 1], 8 * offset);
    }
  };

  __device__ __forceinline__ void write_shifted(int i, Slot<Bytes>* own, std::uint32_t offset,
                                                const std::uint32_t (&words)[4]) {
    const std::int64_t own_in_first = (kChunkBytes - offset) / Bytes;
    std::uint32_t aligned[4] = {words[0], words[1], words[2], words[3]};
    if (offset) with_word_offset(offset, ShiftOnStore{*this, words, aligned, offset});
    if (offset && i == 0 && lane_ == 0)
      write_elements(own, words, 0, own_in_first);
    else
      *reinterpret_cast<uint4*>(reinterpret_cast<std::uintptr_t>(own) - offset) =
          make_uint4(aligned[0], aligned[1], aligned[2], aligned[3]);
    if (offset && i == L::kChunksPerLane - 1 && lane_ == kLanes - 1)
      write_elements(own, words, own_in_first, L::kChunkElements);
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
  std::uint32_t last_[4];  // of the chunk written last
};

}  // namespace bitsparse::kernels
