// The restore kernel: a tile's blob comes into shared memory by one bulk copy, then each warp expands its block.
//
// A warp turns codes into whole values, side by side, from where each lane takes its own by its mask.
// The same kernel applies the gradient: it has the pre-activation's values at hand and multiplies in place.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/blob_store.cuh"
#include "device/block_io.cuh"
#include "device/codes.cuh"
#include "device/mask.cuh"
#include "device/ptx.cuh"
#include "device/scalar.cuh"
#include "device/tile.cuh"
#include "launch.h"
#include "tuning.h"

namespace bitsparse::kernels {

enum class Output { value, activation, gradient };

template <DType D, Codec C, Keep K, Epilogue E, Output O>
struct RestoreConfig {
  static constexpr DType kDType = D;
  static constexpr Codec kCodec = C;
  static constexpr Epilogue kEpilogue = E;
  static constexpr Output kOutput = O;
  static constexpr int kBytes = Scalar<D>::kBytes;
  static constexpr bool kRotates = rotates_sign(C, K);
  using L = BlockLayout<kBytes>;
  static constexpr int kThreads = L::kBlocksPerTile * kLanes;
  static constexpr int kStageWords = (L::kMaxTileWords + 3) / 4 * 4 + 4;  // unpack reads up to two words past the codes
  // `raw` values are read where they are, others unpacked.
  static constexpr int kScratchWords = C == Codec::raw ? 0 : L::kBlockWords + 8;
  static constexpr int kSharedBytes = 4 * (kStageWords + L::kBlocksPerTile * kScratchWords);
};

// The element of mask bit `Bit` from shared address `p` on if it is kept, else zero. Predicated, not branched around.
template <int Bytes, int Bit>
__device__ __forceinline__ std::uint32_t next_element(std::uint32_t& p, std::uint32_t mask) {
  std::uint32_t x = 0;
#define BITSPARSE_POP(load)                                                                   \
  asm volatile("{.reg .pred p; .reg .b32 t; and.b32 t, %2, %3; setp.ne.u32 p, t, 0; @p " load \
               " %0, [%1]; @p add.u32 %1, %1, %4;}"                                           \
               : "+r"(x), "+r"(p)                                                             \
               : "r"(mask), "n"(1u << Bit), "n"(Bytes)                                        \
               : "memory")
  if constexpr (Bytes == 1) BITSPARSE_POP("ld.shared.u8");
  if constexpr (Bytes == 2) BITSPARSE_POP("ld.shared.u16");
  if constexpr (Bytes == 4) BITSPARSE_POP("ld.shared.u32");
#undef BITSPARSE_POP
  return x;
}

// The lane's J-th word.
template <int Bytes, int J>
__device__ __forceinline__ std::uint32_t next_word(std::uint32_t& p, std::uint32_t mask) {
  using L = BlockLayout<Bytes>;
  constexpr int e = J * (4 / Bytes);
  if constexpr (Bytes == 4) {
    return next_element<4, L::mask_bit(e)>(p, mask);
  } else if constexpr (Bytes == 2) {
    const std::uint32_t low = next_element<2, L::mask_bit(e)>(p, mask);
    const std::uint32_t high = next_element<2, L::mask_bit(e + 1)>(p, mask);
    return __byte_perm(low, high, 0x5410);
  } else {
    const std::uint32_t b0 = next_element<1, L::mask_bit(e)>(p, mask),
                        b1 = next_element<1, L::mask_bit(e + 1)>(p, mask);
    const std::uint32_t b2 = next_element<1, L::mask_bit(e + 2)>(p, mask),
                        b3 = next_element<1, L::mask_bit(e + 3)>(p, mask);
    return __byte_perm(__byte_perm(b0, b1, 0x0040), __byte_perm(b2, b3, 0x0040), 0x5410);
  }
}

// The lane's elements, chunk by chunk, to `output`.
template <class Config, int I = 0, class Output>
__device__ __forceinline__ void expand(std::uint32_t& p, std::uint32_t mask, const Output& output) {
  if constexpr (I < Config::L::kChunksPerLane) {
    constexpr int kBytes = Config::kBytes;
    uint4 chunk;
    chunk.x = next_word<kBytes, 4 * I>(p, mask);
    chunk.y = next_word<kBytes, 4 * I + 1>(p, mask);
    chunk.z = next_word<kBytes, 4 * I + 2>(p, mask);
    chunk.w = next_word<kBytes, 4 * I + 3>(p, mask);
    output(I, chunk);
    expand<Config, I + 1>(p, mask, output);
  }
}

// A tile's blob on its way into shared memory. In two halves, so that a caller's own loads run meanwhile.
struct BlobLoad {
  std::uint32_t* stage;
  bool* lost;              // shared memory: the arena had no room for the tile
  std::uint64_t* arrived;  // shared memory, a barrier

  __device__ __forceinline__ void start(const BlobStore& store) const {
    if constexpr (!Target::kBulkCopy) return;
    if (threadIdx.x != 0) return;
    const std::uint64_t entry = __ldg(reinterpret_cast<const unsigned long long*>(&store.tiles[this_tile()]));
    barrier_init(arrived);
    std::uint32_t units;
    const Placement from = find_blob(store, entry, units);
    *lost = from.lost;
    if (from.lost) return;
    barrier_expect(arrived, units * kUnitBytes);
    bulk_load(shared_address(stage), from.first, from.first_units * kUnitBytes, arrived);
    if (from.first_units < units)
      bulk_load(shared_address(stage) + from.first_units * kUnitBytes, from.second,
                (units - from.first_units) * kUnitBytes, arrived);
  }

  // Block-wide. False: the tile is lost.
  __device__ __forceinline__ bool finish(const BlobStore& store) const {
    if constexpr (Target::kBulkCopy) {
      __syncthreads();
      if (*lost) return false;
      barrier_wait(arrived);
    } else {
      std::uint32_t units;
      const Placement from =
          find_blob(store, __ldg(reinterpret_cast<const unsigned long long*>(&store.tiles[this_tile()])), units);
      if (from.lost) return false;
      for (std::uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
        const std::uint8_t* p =
            i < from.first_units ? from.first + i * kUnitBytes : from.second + (i - from.first_units) * kUnitBytes;
        reinterpret_cast<uint4*>(stage)[i] = *reinterpret_cast<const uint4*>(p);
      }
      __syncthreads();
    }
    return true;
  }
};

// What a lane writes of its i-th chunk, given the kept values in their places and zeros elsewhere.
template <class Config, bool Whole>
struct ChunkOutput {
  void* data;
  std::int64_t first, numel;
  int lane;
  const uint4* grad;

  __device__ __forceinline__ void operator()(int i, const uint4& values) const {
    constexpr DType D = Config::kDType;
    std::uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (Config::kOutput == Output::activation) words[j] = activate<D, Config::kEpilogue>(words[j]);
      if constexpr (Config::kOutput == Output::gradient)
        words[j] =
            activation_gradient<D, Config::kEpilogue>(words[j], reinterpret_cast<const std::uint32_t*>(grad + i)[j]);
    }
    store_chunk<Config::kBytes, Whole, Config::kOutput != Output::gradient>(data, first, numel, lane, i, words);
  }
};

template <class Config, bool Whole>
__device__ __forceinline__ void restore_tile(void* data, std::int64_t numel, const BlobStore& store) {
  using L = typename Config::L;
  constexpr int kBytes = Config::kBytes;
  constexpr bool kGradient = Config::kOutput == Output::gradient;

  extern __shared__ __align__(128) std::uint32_t shared[];
  __shared__ bool lost;
  __shared__ __align__(8) std::uint64_t arrived;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  std::uint32_t* stage = shared;
  const BlobLoad load{stage, &lost, &arrived};
  load.start(store);
  const std::int64_t first = (static_cast<std::int64_t>(this_tile()) * L::kBlocksPerTile + warp) * kBlockElements;
  uint4 grad[kGradient ? L::kChunksPerLane : 1];
  if constexpr (kGradient) load_block<kBytes, Whole, false>(data, first, numel, lane, grad);
  if (!load.finish(store)) {  // the arena had no room for this tile: be seen
    constexpr std::uint32_t nan = Scalar<Config::kDType>::kNaN;
#pragma unroll
    for (int i = 0; i < L::kChunksPerLane; ++i) {
      const std::uint32_t words[4] = {nan, nan, nan, nan};
      store_chunk<kBytes, Whole, false>(data, first, numel, lane, i, words);
    }
    return;
  }

  const ChunkOutput<Config, Whole> output{data, first, numel, lane, grad};
  const std::uint32_t header = stage[warp];
  const std::uint32_t* body = stage + L::header_offset(header);
  const MaskKind kind = L::header_kind(header);
  std::uint32_t mask = 0, mask_words = 0;
  if (kind == MaskKind::flat) {
    mask = body[lane];
    mask_words = kFlatMaskWords;
  } else if (may_be_two_level(Config::kCodec) && kind == MaskKind::two_level) {
    mask = read_two_level(body, lane, mask_words);
  } else if (kind == MaskKind::dense) {
    mask = ~0u;
  }
  const std::uint32_t lane_kept = __popc(mask);
  const std::uint32_t inclusive = warp_inclusive_sum(lane_kept);
  const std::uint32_t* values = body + mask_words;
  if constexpr (Config::kCodec != Codec::raw) {
    const std::uint32_t kept = __shfl_sync(~0u, inclusive, kLanes - 1);
    std::uint32_t* scratch = shared + Config::kStageWords + warp * Config::kScratchWords;
    Codes<kBytes>::template unpack<Config::kRotates>(values, kept, L::header_width(header), L::header_reference(header),
                                                     scratch, lane);
    __syncwarp();
    values = scratch;
  }
  std::uint32_t p = shared_address(values) + (inclusive - lane_kept) * kBytes;
  expand<Config>(p, mask, output);
}

// Out of line: rare, and not to cost the other tiles a register.
template <class Config>
__device__ __noinline__ void restore_edge_tile(void* data, std::int64_t numel, const BlobStore& store) {
  restore_tile<Config, false>(data, numel, store);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, resident_blocks(Target::kRestore, Config::kDType))
    restore_kernel(void* data, std::int64_t numel, const __grid_constant__ BlobStore store) {
  if (tile_is_whole<Config::kBytes>(data, this_tile(), numel))
    restore_tile<Config, true>(data, numel, store);
  else
    restore_edge_tile<Config>(data, numel, store);
}

}  // namespace bitsparse::kernels
