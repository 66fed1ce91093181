// The epilogue that compresses: activation(x wᵀ + b) and the compressed form of x wᵀ + b, which itself is never
// written.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "bitsparse/format.h"
#include "device/blob_store.cuh"
#include "device/compress.cuh"
#include "device/hopper_linear.cuh"
#include "device/patch_io.cuh"
#include "launch.h"

namespace bitsparse::kernels {

// In front of a strip is room for its blob's headers: as blocks are encoded, the blob grows over them, and no block
// takes more than it did.
template <Codec C, Epilogue E, bool ManyCodecWarps>
struct LinearCompress : LinearLayout<ManyCodecWarps, 4 * BlockLayout<2>::kBlocksPerTile,
                                     4 * CompressConfig<DType::bfloat16, C, Keep::positive, E>::kSlotWords> {
  using Block = CompressConfig<DType::bfloat16, C, Keep::positive, E>;
  using Layout = LinearCompress;
  static constexpr bool kTransposedW = false;

  struct Worker {
    using L = typename Block::L;
    const LinearOperands& operands;
    const Strips& strips;
    std::uint32_t* slots;
    int lane;
    __device__ Worker(const LinearOperands& operands, const Strips& strips, int /*first*/, std::uint32_t* slots,
                      int lane)
        : operands(operands), strips(strips), slots(slots), lane(lane) {}

    // Warp-wide: strip `s`, once `wait` returns.
    template <class Wait>
    __device__ __forceinline__ void work(int s, std::uint8_t* strip, const Wait& wait) {
      const auto [row, column] = strips.at(s);
      const std::int64_t columns = operands.shape.columns;
      const PatchTiles tiles(operands.shape);
      const auto moves = ByteMoves<Block::kBytes>::compacting(lane);
      auto* const blob = reinterpret_cast<std::uint32_t*>(strip);
      std::uint32_t words = L::kBlocksPerTile, kept = 0, units = 0;
      std::uint64_t ticket = 0;
      wait();
#pragma unroll 1
      for (int b = 0; b < L::kBlocksPerTile; ++b) {
        LaneBlock<Block> block;
#pragma unroll
        for (int i = 0; i < L::kChunksPerLane; ++i)
          block.elements[i] = strip_chunk(strip + Layout::kHeaderBytes + b * Layout::kBlockBytes, i, lane);
        take_block(block, PatchChunks(operands.out, row, column + b * Patch::kColumns, columns, lane));
        __syncwarp();  // the block may be overwritten
        const BlockPlan plan = prepare_block<Block>(block, moves, slots, /*whole=*/true, lane);
        const std::uint32_t after = words + plan.mask_words + plan.code_words;
        kept += block.all.kept();
        if (b == L::kBlocksPerTile - 1) {
          units = (after + 3) >> 2;
          if (lane == 0) ticket = reserve_units(operands.store, units);
          if (after + lane < 4 * units) blob[after + lane] = 0;
        }
        if (lane == 0) blob[b] = L::make_header(words, plan.width, plan.kind, plan.stored_reference);
        write_body(block, moves, plan, slots, blob + words, lane);
        words = after;
        __syncwarp();
      }
      fence_shared_to_bulk();
      __syncwarp();
      bool last = false;
      if (lane == 0) {
        const Reservation reservation = reservation_of(ticket, tiles.count);
        last = reservation.last;
        const Placement where = place_blob(operands.store, tiles.at(row, column), reservation, units, kept);
        bulk_store_blob(blob, units, where);
        if (last) ticket = reservation.offset + units;
      }
      if (__shfl_sync(~0u, last, 0))
        finish_lease(cooperative_groups::tiled_partition<kLanes>(cooperative_groups::this_thread_block()),
                     operands.store, __shfl_sync(~0u, ticket, 0));
    }
  };
};

}  // namespace bitsparse::kernels
