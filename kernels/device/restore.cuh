// The restore kernel: a tile's blob comes into shared memory by one bulk copy, then each warp expands its block.
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
  static constexpr int kSharedBytes =
      4 * (kStageWords + (C == Codec::raw ? 0 : L::kBlocksPerTile * Codes<kBytes>::kScratchWords));
};

// The lane's next kept element, if `kept`, else zero.
template <int Bytes>
__device__ __forceinline__ std::uint32_t next_slot(const Slot<Bytes>*& p, bool kept) {
  std::uint32_t x = 0;
  if (kept) x = *p++;
  return x;
}

template <int Bytes>
__device__ __forceinline__ std::uint32_t next_word(const Slot<Bytes>*& p, std::uint32_t mask, int j) {
  if constexpr (Bytes == 4) return next_slot<4>(p, mask_test<4>(mask, j, 0));
  if constexpr (Bytes == 2) {
    const std::uint32_t low = next_slot<2>(p, mask_test<2>(mask, j, 0));
    const std::uint32_t high = next_slot<2>(p, mask_test<2>(mask, j, 1));
    return __byte_perm(low, high, 0x5410);
  }
  std::uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < 4 / Bytes; ++k) word |= next_slot<Bytes>(p, mask_test<Bytes>(mask, j, k)) << (8 * Bytes * k % 32);
  return word;
}

template <class Config, bool Whole>
__device__ __forceinline__ void restore_tile(void* data, std::int64_t numel, const BlobStore& store) {
  using L = typename Config::L;
  constexpr int kBytes = Config::kBytes, kBlocks = L::kBlocksPerTile;
  constexpr DType D = Config::kDType;
  constexpr bool kGradient = Config::kOutput == Output::gradient;

  extern __shared__ __align__(128) std::uint32_t shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  std::uint32_t* stage = shared;
  std::uint32_t* slots = shared + Config::kStageWords + warp * Codes<kBytes>::kScratchWords;

  __shared__ bool lost;
#if BITSPARSE_BULK_COPY
  __shared__ __align__(8) std::uint64_t arrived;
  if (threadIdx.x == 0) {
    const std::uint64_t entry = __ldg(reinterpret_cast<const unsigned long long*>(&store.tiles[blockIdx.x]));
    const Placement from = find_blob(store, entry);
    const std::uint32_t units = entry_size(entry);
    lost = from.lost;
    barrier_init(&arrived);
    if (!from.lost) {
      barrier_expect(&arrived, units * kUnitBytes);
      bulk_load(shared_address(stage), from.first, from.first_units * kUnitBytes, &arrived);
      if (from.first_units < units)
        bulk_load(shared_address(stage) + from.first_units * kUnitBytes, from.second,
                  (units - from.first_units) * kUnitBytes, &arrived);
    }
  }
#endif
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * kBlocks + warp) * kBlockElements;
  uint4 grad[kGradient ? L::kChunksPerLane : 1];
  if constexpr (kGradient) load_block<kBytes, Whole, false>(data, first, numel, lane, grad);
#if BITSPARSE_BULK_COPY
  __syncthreads();
  if (!lost) barrier_wait(&arrived);
#else
  {
    const std::uint64_t entry = __ldg(reinterpret_cast<const unsigned long long*>(&store.tiles[blockIdx.x]));
    const Placement from = find_blob(store, entry);
    if (threadIdx.x == 0) lost = from.lost;
    if (!from.lost)
      for (std::uint32_t i = threadIdx.x; i < entry_size(entry); i += Config::kThreads) {
        const std::uint8_t* p =
            i < from.first_units ? from.first + i * kUnitBytes : from.second + (i - from.first_units) * kUnitBytes;
        reinterpret_cast<uint4*>(stage)[i] = *reinterpret_cast<const uint4*>(p);
      }
    __syncthreads();
  }
#endif
  if (lost) {  // the arena had no room for this tile: be seen
    constexpr std::uint32_t nan = Scalar<D>::kNaN;
#pragma unroll
    for (int i = 0; i < L::kChunksPerLane; ++i) {
      const std::uint32_t words[4] = {nan, nan, nan, nan};
      store_chunk<kBytes, Whole, false>(data, first, numel, lane, i, words);
    }
    return;
  }

  const std::uint32_t header = stage[warp];
  const MaskKind kind = L::header_kind(header);
  const std::uint32_t* body = stage + L::header_offset(header);
  std::uint32_t mask = 0, mask_words = 0;
  if (kind == MaskKind::flat) {
    mask = body[lane];
    mask_words = kFlatMaskWords;
  } else if (kind == MaskKind::two_level) {
    mask = read_two_level(body, lane, mask_words);
  } else if (kind == MaskKind::dense) {
    mask = ~0u;
  }
  const std::uint32_t lane_kept = __popc(mask);
  const std::uint32_t inclusive = warp_inclusive_sum(lane_kept);
  const std::uint32_t* values = body + mask_words;
  if constexpr (Config::kCodec != Codec::raw) {
    const std::uint32_t kept = __shfl_sync(~0u, inclusive, 31);
    Codes<kBytes>::unpack(values, kept, L::header_width(header), L::header_reference(header), slots, lane);
    __syncwarp();
    values = slots;
  }

  const Slot<kBytes>* p = reinterpret_cast<const Slot<kBytes>*>(values) + (inclusive - lane_kept);
#pragma unroll
  for (int i = 0; i < L::kChunksPerLane; ++i) {
    std::uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      std::uint32_t x = next_word<kBytes>(p, mask, 4 * i + j);
      if constexpr (Config::kRotates) x = unrotate_sign<kBytes>(x);
      if constexpr (Config::kOutput == Output::activation) x = activate<D, Config::kEpilogue>(x);
      if constexpr (kGradient)
        x = activation_gradient<D, Config::kEpilogue>(x, reinterpret_cast<const std::uint32_t*>(&grad[i])[j]);
      words[j] = x;
    }
    store_chunk<kBytes, Whole, !kGradient>(data, first, numel, lane, i, words);
  }
}

// Out of line: rare, and not to cost the other tiles a register.
template <class Config>
__device__ __noinline__ void restore_edge_tile(void* data, std::int64_t numel, const BlobStore& store) {
  restore_tile<Config, false>(data, numel, store);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Tuning::restore_blocks(Config::kDType))
    restore_kernel(void* data, std::int64_t numel, const __grid_constant__ BlobStore store) {
  if (tile_is_whole<Config::kBytes>(data, blockIdx.x, numel))
    restore_tile<Config, true>(data, numel, store);
  else
    restore_edge_tile<Config>(data, numel, store);
}

}  // namespace bitsparse::kernels
