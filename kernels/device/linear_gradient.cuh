// The epilogue that decompresses: (dy w2) * d activation / d h, from the compressed form of h.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/blob_store.cuh"
#include "device/blob_words.cuh"
#include "device/codes.cuh"
#include "device/hopper_linear.cuh"
#include "device/mask.cuh"
#include "device/patch_io.cuh"
#include "device/restore.cuh"
#include "launch.h"

namespace bitsparse::kernels {

template <Epilogue E>
struct LinearGradient : LinearLayout</*ManyCodecWarps=*/false, 0, 4 * (BlockLayout<2>::kBlockWords + 8)> {
  static constexpr DType kDType = DType::bfloat16;
  using L = BlockLayout<2>;
  using Layout = LinearGradient;
  using Block = RestoreConfig<kDType, Codec::tight, Keep::positive, E, Output::gradient, Geometry::patch>;
  static constexpr bool kTransposedW = true;
  static constexpr int kAhead = 3;  // steps of decoding whose words are asked for at once

  // The lane's kept values meet the gradient of the activation.
  struct Output {
    const std::uint8_t* block;
    PatchChunks chunks;
    int lane;
    __device__ __forceinline__ void operator()(int i, const uint4& values) const {
      const uint4 grad = strip_chunk(block, i, lane);
      const std::uint32_t words[4] = {
          activation_gradient<kDType, E>(values.x, grad.x), activation_gradient<kDType, E>(values.y, grad.y),
          activation_gradient<kDType, E>(values.z, grad.z), activation_gradient<kDType, E>(values.w, grad.w)};
      chunks.write(i, words);
    }
  };

  struct Worker {
    const LinearOperands& operands;
    const Strips& strips;
    std::uint32_t* slots;
    int lane;
    std::uint64_t entry, next_entry;  // in the tile table, of the strip to come and of the one after it
    __device__ Worker(const LinearOperands& operands, const Strips& strips, int first, std::uint32_t* slots, int lane)
        : operands(operands),
          strips(strips),
          slots(slots),
          lane(lane),
          entry(entry_of(first)),
          next_entry(entry_of(first + Layout::kCodecWarps)) {}

    __device__ std::uint64_t entry_of(int s) const {
      if (s >= strips.count) return kEntryLost;
      const auto [row, column] = strips.at(s);
      const std::uint32_t tile = PatchTiles(operands.shape).at(row, column);
      return __ldg(reinterpret_cast<const unsigned long long*>(&operands.store.tiles[tile]));
    }

    // The next blob on its way to L2, the entry after it to a register.
    __device__ __forceinline__ void look_ahead(int s) {
      entry = next_entry;
      if (lane == 0 && !(entry & kEntryLost)) {
        std::uint32_t units;
        const Placement next = find_blob(operands.store, entry, units);
        prefetch_to_l2(next.first, next.first_units * kUnitBytes);
        if (next.first_units < units) prefetch_to_l2(next.second, (units - next.first_units) * kUnitBytes);
      }
      next_entry = entry_of(s + 2 * Layout::kCodecWarps);
    }

    // Warp-wide: strip `s`, once `wait` returns.
    template <class Wait>
    __device__ __forceinline__ void work(int s, std::uint8_t* strip, const Wait& wait) {
      const auto [row, column] = strips.at(s);
      const auto moves = ByteMoves<2>::expanding(lane);
      std::uint32_t units;
      const Placement from = find_blob(operands.store, entry, units);
      const BlobWords blob(from, units);
      const std::uint32_t headers = lane < L::kBlocksPerTile && !from.lost ? blob[lane] : 0;
      look_ahead(s);
#pragma unroll 1
      for (int b = 0; b < L::kBlocksPerTile; ++b) {
        const PatchChunks chunks(operands.out, row, column + b * Patch::kColumns, operands.shape.columns, lane);
        if (from.lost) {  // the arena had no room for this tile: be seen
          if (b == 0) wait();
          write_nan<kDType>(chunks);
          continue;
        }
        const std::uint32_t header = __shfl_sync(~0u, headers, b);
        const BlobWords body = blob + L::header_offset(header);
        const MaskKind kind = L::header_kind(header);
        auto mask = LaneMask<2>::filled_with(kind == MaskKind::dense ? ~0u : 0);
        std::uint32_t mask_words = 0;
        if (kind == MaskKind::flat) {
          mask = read_flat<2>(body, lane);
          mask_words = L::kFlatMaskWords;
        } else if (kind == MaskKind::two_level) {
          mask = read_two_level<2>(body, lane, mask_words);
        }
        const std::uint32_t lane_kept = mask.kept(), inclusive = warp_inclusive_sum(lane_kept);
        Codes<2>::unpack<kAhead>(body + mask_words, __shfl_sync(~0u, inclusive, kLanes - 1), L::header_width(header),
                                 L::header_reference(header), slots, lane, [](std::uint32_t word) { return word; });
        if (b == 0) wait();
        __syncwarp();
        Output output{strip + b * Layout::kBlockBytes, chunks, lane};
        expand<Block>(slots, inclusive - lane_kept, mask, moves, output);
        __syncwarp();  // slots may be overwritten
      }
    }
  };
};

}  // namespace bitsparse::kernels
