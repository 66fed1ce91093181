// The gradient of plain ReLU, in place: of the compressed form it needs the masks alone, so that it reads no codes, and
// has one kernel for all codecs.
//
// Each warp finds its block's mask by itself. Only a block without a mask has its values looked at.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/blob_store.cuh"
#include "device/blob_words.cuh"
#include "device/block_io.cuh"
#include "device/mask.cuh"
#include "device/restore.cuh"
#include "device/scalar.cuh"
#include "device/tile.cuh"
#include "launch.h"
#include "tuning.h"

namespace bitsparse::kernels {

template <DType D>
struct ReluGradientConfig : RestoreConfig<D, Codec::tight, Keep::positive, Epilogue::relu, Output::gradient> {
  using Base = RestoreConfig<D, Codec::tight, Keep::positive, Epilogue::relu, Output::gradient>;
  static constexpr int kSharedBytes = 4 * Base::L::kBlocksPerTile * Base::kScratchWords;  // of blocks without a mask
};

// Warp-wide: a block without a mask. Out of line: rare, and not to cost the other blocks a register.
template <class Config, Access A>
__device__ __noinline__ void relu_gradient_of_dense_block(void* data, std::int64_t numel, const BlobStore& store,
                                                          std::uint64_t entry) {
  using L = typename Config::L;
  constexpr int kBytes = Config::kBytes;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const std::int64_t first = first_of_block<kBytes>(warp);
  const auto moves = ByteMoves<kBytes>::expanding(lane);
  uint4 grad[L::kChunksPerLane];
  load_chunks<kBytes, A, true, 0, L::kChunksPerLane>(data, first, numel, lane, grad);
  std::uint32_t units;
  const Placement from = find_blob(store, entry, units);
  const BlobWords blob(from, units);
  const std::uint32_t header = blob[warp];
  std::uint32_t* const values = dynamic_shared() + warp * Config::kScratchWords;
  Codes<kBytes>::unpack(blob + L::header_offset(header), L::kBlockElements, L::header_width(header),
                        L::header_reference(header), values, lane, [](std::uint32_t word) { return word; });
  __syncwarp();
  using Writer = ChunkWriter<kBytes, A, false>;
  ChunkOutput<Config, Writer> output{Writer(data, first, numel, lane), grad};
  expand<Config>(values, lane * L::kLaneElements, LaneMask<kBytes>::filled_with(~0u), moves, output);
}

template <class Config, Access A>
__device__ __forceinline__ void relu_gradient_tile(void* data, std::int64_t numel, const BlobStore& store) {
  using L = typename Config::L;
  constexpr int kBytes = Config::kBytes;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const std::int64_t first = first_of_block<kBytes>(warp);
  const std::uint64_t entry = __ldg(reinterpret_cast<const unsigned long long*>(&store.tiles[this_tile()]));
  uint4 grad[L::kChunksPerLane];
  load_chunks<kBytes, A, true, 0, L::kChunksPerLane>(data, first, numel, lane, grad);
  ChunkWriter<kBytes, A, false> writer(data, first, numel, lane);
  std::uint32_t units;
  const Placement from = find_blob(store, entry, units);
  if (from.lost) return write_nan<Config::kDType>(writer);  // the arena had no room for this tile: be seen
  const BlobWords blob(from, units);
  const std::uint32_t header = blob[warp];
  const BlobWords body = blob + L::header_offset(header);
  const MaskKind kind = L::header_kind(header);
  auto mask = LaneMask<kBytes>::filled_with(0);
  std::uint32_t mask_words;
  if (kind == MaskKind::flat) {
    mask = read_flat<kBytes>(body, lane);
  } else if (kind == MaskKind::two_level) {
    mask = read_two_level<kBytes>(body, lane, mask_words);
  } else if (kind == MaskKind::dense) {
    return relu_gradient_of_dense_block<Config, A>(data, numel, store, entry);
  }
#pragma unroll
  for (int i = 0; i < L::kChunksPerLane; ++i) {
    const std::uint32_t g[4] = {grad[i].x, grad[i].y, grad[i].z, grad[i].w};
    std::uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = g[j] & mask.kept_in(4 * i + j);
    writer.write(i, words);
  }
}

// Out of line: rare, and not to cost the other tiles a register.
template <class Config>
__device__ __noinline__ void relu_gradient_edge_tile(void* data, std::int64_t numel, const BlobStore& store) {
  if (tile_may_shift<Config::kBytes>(this_tile(), numel))
    relu_gradient_tile<Config, Access::shifted>(data, numel, store);
  else
    relu_gradient_tile<Config, Access::elements>(data, numel, store);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, resident_blocks(Target::kRestore, Config::kDType))
    relu_gradient_kernel(void* data, std::int64_t numel, const __grid_constant__ BlobStore store) {
  if (tile_is_whole<Config::kBytes>(reinterpret_cast<std::uintptr_t>(data), this_tile(), numel))
    relu_gradient_tile<Config, Access::whole>(data, numel, store);
  else
    relu_gradient_edge_tile<Config>(data, numel, store);
}

}  // namespace bitsparse::kernels
