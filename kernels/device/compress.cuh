// The compress kernel: one pass over the input, one warp a block, one thread block a tile.
//
// A warp loads its block, writes the activation, and puts the kept elements side by side in shared memory, which tells
// the block's size. Blobs are assembled in shared memory, too, and leave it by one bulk copy. Two barriers: all sizes
// known; blob complete.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/blob_store.cuh"
#include "device/block_io.cuh"
#include "device/block_plan.cuh"
#include "device/codes.cuh"
#include "device/mask.cuh"
#include "device/ptx.cuh"
#include "device/scalar.cuh"
#include "device/slots.cuh"
#include "device/tile.cuh"
#include "device/unaligned.cuh"
#include "launch.h"
#include "tuning.h"

namespace bitsparse::kernels {

// What the warps of a tile tell each other, in front of its blob.
struct alignas(16) TileState {
  std::uint32_t block_sizes[4];  // words of the body | kept elements << 16
  Placement where;
  std::uint64_t final_units;  // 0: not the tile that reserved last
};
constexpr int kTileStateWords = 32;
static_assert(sizeof(TileState) <= 4 * kTileStateWords);

template <DType D, Codec C, Keep K, Epilogue E>
struct CompressConfig {
  static constexpr DType kDType = D;
  static constexpr Codec kCodec = C;
  static constexpr Keep kKeep = K;
  static constexpr Epilogue kEpilogue = E;
  static constexpr int kBytes = Scalar<D>::kBytes;
  static constexpr bool kRotates = rotates_sign(C, K);
  // Elements that are not kept become zero as they are read, unless they are zero, or nobody looks at them until they
  // are left out.
  static constexpr bool kLooks = C == Codec::signless || E != Epilogue::none;
  static constexpr bool kDropsEarly = K == Keep::positive && (kBytes > 1 || kLooks);
  using L = BlockLayout<kBytes>;
  static constexpr int kThreads = L::kBlocksPerTile * kLanes;
  static constexpr int kStageWords = (L::kMaxTileWords + 3) / 4 * 4;
  // `raw` codes go straight to their place; the other codecs first gather a block's kept elements.
  static constexpr int kSlotWords = C == Codec::raw ? 0 : L::kBlockWords + 8;
  static constexpr int kSharedBytes = 4 * (kTileStateWords + kStageWords + L::kBlocksPerTile * kSlotWords);
};

// What a lane holds of its warp's block.
template <class Config>
struct LaneBlock {
  using L = typename Config::L;
  uint4 elements[L::kChunksPerLane];  // those that are not kept are zero, unless they are bytes
  LaneMask<Config::kBytes> mask;
  MaskCounts before;  // of lower lanes
  MaskCounts all;     // of the block
};

// For a block whose activation has been written.
struct NothingToWrite {
  __device__ __forceinline__ void write(int, const std::uint32_t (&)[4]) const {}
};

// Drops those of four words' elements that are not kept; their activation.
template <class Config>
__device__ __forceinline__ uint4 activate_chunk(uint4& chunk) {
  uint4 activation;
  auto* const x = reinterpret_cast<std::uint32_t*>(&chunk);
  auto* const y = reinterpret_cast<std::uint32_t*>(&activation);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    x[j] &= keep_mask<Config::kDType, Config::kKeep>(x[j]);
    y[j] = activate<Config::kDType, Config::kEpilogue>(x[j]);
  }
  return activation;
}

// Writes the activation of the block's elements, drops those that are not kept, and counts the others.
template <class Config, class Writer>
__device__ __forceinline__ void take_block(LaneBlock<Config>& block, Writer writer) {
  using L = typename Config::L;
  constexpr int kBytes = Config::kBytes;
  constexpr Epilogue E = Config::kEpilogue;
  block.mask = LaneMask<kBytes>::filled_with(0);
  std::uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < L::kChunksPerLane; ++i) {
    std::uint32_t* x = reinterpret_cast<std::uint32_t*>(&block.elements[i]);
    std::uint32_t kept[4], activation[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (kBytes > 1 && Config::kKeep == Keep::nonzero) {
        block.mask.of(4 * i) += nonzero_mask_bits<kBytes>(x[j], 4 * i + j);
      } else {
        kept[j] = keep_mask<Config::kDType, Config::kKeep>(x[j]);
        if constexpr (kBytes > 1) block.mask.of(4 * i) |= mask_bits<kBytes>(kept[j], 4 * i + j);
        if constexpr (Config::kDropsEarly) x[j] &= kept[j];
      }
      if constexpr (Config::kCodec == Codec::signless) any |= x[j];
      if constexpr (E != Epilogue::none) activation[j] = activate<Config::kDType, E>(x[j]);
    }
    if constexpr (kBytes == 1) block.mask.of(4 * i) += byte_mask_bits(kept, i);
    if constexpr (E != Epilogue::none) writer.write(i, activation);
  }
  constexpr std::uint32_t kSigns = kBytes == 4 ? 0x80000000u : kBytes == 2 ? 0x80008000u : 0x80808080u;
  const MaskCounts own = count_mask<may_be_two_level(Config::kCodec)>(block.mask, any & kSigns);
  const std::uint32_t through = warp_inclusive_sum(own.packed);
  block.before = {through - own.packed};
  block.all = {__shfl_sync(~0u, through, kLanes - 1)};
}

// The same for a block that starts somewhere in an aligned chunk, and whose activation goes to one of the same offset,
// or to an aligned one. Elementwise work doesn't mind how chunks lie: only what is compressed has to be shifted.
template <class Config>
__device__ __forceinline__ void take_shifted_block(LaneBlock<Config>& block, const void* in, void* out,
                                                   std::int64_t first, int lane) {
  using L = typename Config::L;
  using Element = Slot<Config::kBytes>;
  using Chunks = AlignedChunks<Config::kBytes, L::kChunksPerLane>;
  Chunks chunks = Chunks::template load<true>(static_cast<const Element*>(in) + first, lane);
  bool written = false;
  if constexpr (Config::kEpilogue != Epilogue::none) {
    written = offset_in_chunk(out) != 0;
    if (written) {
      Element* const to = static_cast<Element*>(out) + first;
#pragma unroll
      for (int i = 0; i < L::kChunksPerLane; ++i) chunks.store(i, activate_chunk<Config>(chunks.own[i]), to, lane);
      if (lane == 0) chunks.store_past(activate_chunk<Config>(chunks.past), to);
    }
  }
  chunks.shift(block.elements, lane);
  if constexpr (Config::kEpilogue != Epilogue::none) {
    if (!written) {
      uint4* const to = reinterpret_cast<uint4*>(static_cast<Element*>(out) + first) + lane;
#pragma unroll
      for (int i = 0; i < L::kChunksPerLane; ++i) to[i * kLanes] = activate_chunk<Config>(block.elements[i]);
    }
  }
  take_block(block, NothingToWrite());
}

// Warp-wide, before sizes are known: leaves in `slots` what is to be coded, but for `raw`, whose codes are the elements
// themselves.
template <class Config>
__device__ __forceinline__ BlockPlan prepare_block(const LaneBlock<Config>& block,
                                                   const ByteMoves<Config::kBytes>& moves, std::uint32_t* slots,
                                                   bool whole, int lane) {
  if constexpr (Config::kCodec != Codec::raw) {
    pad_slots<Config::kBytes>(slots, block.all.kept(), lane);
    gather_kept<Config::kDType, Config::kKeep>(slots, block.before.kept(), block.elements, block.mask, moves);
    __syncwarp();
  }
  const BlockPlan plan = plan_block<Config::kBytes, Config::kCodec, Config::kRotates>(slots, block.all, whole, lane);
  if (Config::kCodec != Codec::raw && plan.kind == MaskKind::dense) {
    __syncwarp();
    gather_all<Config::kRotates>(slots, block.elements, block.mask, lane);
    __syncwarp();
  } else if constexpr (Config::kCodec == Codec::tight) {
    pad_with_reference<Config::kBytes>(slots, block.all.kept(), plan.stored_reference, lane);
  }
  return plan;
}

// Warp-wide: the block's body, at its place in the blob.
template <class Config>
__device__ __forceinline__ void write_body(const LaneBlock<Config>& block, const ByteMoves<Config::kBytes>& moves,
                                           const BlockPlan& plan, const std::uint32_t* slots, std::uint32_t* body,
                                           int lane) {
  constexpr int kBytes = Config::kBytes;
  if (plan.kind == MaskKind::flat) write_flat(body, block.mask, lane);
  if (may_be_two_level(Config::kCodec) && plan.kind == MaskKind::two_level)
    write_two_level(body, plan.mask_words, block.mask, block.before.nibbles(), lane);
  const std::uint32_t count = plan.kind == MaskKind::dense ? Config::L::kBlockElements : block.all.kept();
  std::uint32_t* codes = body + plan.mask_words;
  if constexpr (Config::kCodec == Codec::raw) {
    if (plan.kind == MaskKind::dense) return gather_all<false>(codes, block.elements, block.mask, lane);
    pad_word<kBytes>(codes, count, lane);
    gather_kept<Config::kDType, Config::kKeep>(codes, block.before.kept(), block.elements, block.mask, moves);
  } else {
    Codes<kBytes>::pack(slots, count, plan.width, plan.stored_reference << Config::L::kReferenceDrop, codes,
                        plan.code_words, lane);
  }
}

// By one thread, once the blob is complete in shared memory.
__device__ __forceinline__ void bulk_store_blob(const std::uint32_t* stage, std::uint32_t units,
                                                const Placement& where) {
  if (where.lost) return;
  bulk_store(where.first, shared_address(stage), where.first_units * kUnitBytes);
  if (where.first_units < units)
    bulk_store(where.second, shared_address(stage) + where.first_units * kUnitBytes,
               (units - where.first_units) * kUnitBytes);
  bulk_store_wait();
}

// Block-wide.
__device__ __forceinline__ void store_blob(const std::uint32_t* stage, std::uint32_t units, const Placement& where) {
  if constexpr (Target::kBulkCopy) {
    if (threadIdx.x == 0) bulk_store_blob(stage, units, where);
  } else {
    if (where.lost) return;
    for (std::uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
      std::uint8_t* to =
          i < where.first_units ? where.first + i * kUnitBytes : where.second + (i - where.first_units) * kUnitBytes;
      *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4*>(stage)[i];
    }
  }
}

template <class Config, Access A>
__device__ __forceinline__ void compress_tile(const void* in, void* out, std::int64_t numel, const BlobStore& store) {
  using L = typename Config::L;
  constexpr int kBlocks = L::kBlocksPerTile;
  static_assert(kBlocks == 4, "sizes of a tile's blocks are read at once");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  std::uint32_t* const shared = dynamic_shared();
  TileState& state = *reinterpret_cast<TileState*>(shared);
  std::uint32_t* const stage = shared + kTileStateWords;
  std::uint32_t* const slots = stage + Config::kStageWords + warp * Config::kSlotWords;

  const std::int64_t first = first_of_block<Config::kBytes>(warp);
  const auto moves = ByteMoves<Config::kBytes>::compacting(lane);
  LaneBlock<Config> block;
  if constexpr (A == Access::shifted) {
    take_shifted_block(block, in, out, first, lane);
  } else {
    load_chunks<Config::kBytes, A, true, 0, L::kChunksPerLane>(in, first, numel, lane, block.elements);
    take_block(block, ChunkWriter<Config::kBytes, A, false>(out, first, numel, lane));
  }
  const bool whole = A != Access::elements || first + L::kBlockElements <= numel;
  const BlockPlan plan = prepare_block(block, moves, slots, whole, lane);
  store_shared_if<4>(lane == 0, &state.block_sizes[warp], plan.mask_words + plan.code_words | block.all.kept() << 16);
  __syncthreads();  // all sizes known

  const uint4 sizes = *reinterpret_cast<const uint4*>(state.block_sizes);
  const std::uint32_t before = (warp > 0 ? sizes.x : 0) + (warp > 1 ? sizes.y : 0) + (warp > 2 ? sizes.z : 0);
  const std::uint32_t all = sizes.x + sizes.y + sizes.z + sizes.w;
  const std::uint32_t offset = kBlocks + (before & 0xffff), total = kBlocks + (all & 0xffff);
  const std::uint32_t units = (total + 3) >> 2;
  std::uint64_t ticket = 0;
  if (threadIdx.x == 0) ticket = reserve_units(store, units);
  if (lane == 0) stage[warp] = L::make_header(offset, plan.width, plan.kind, plan.stored_reference);
  if (threadIdx.x < units * 4 - total) stage[total + threadIdx.x] = 0;
  write_body(block, moves, plan, slots, stage + offset, lane);

  if (threadIdx.x == 0) {
    const Reservation reservation = reservation_of(ticket, gridDim.x);
    state.final_units = reservation.last ? reservation.offset + units : 0;
    state.where = place_blob(store, this_tile(), reservation, units, all >> 16);
  }
  if constexpr (Target::kBulkCopy) fence_shared_to_bulk();
  __syncthreads();  // blob complete
  store_blob(stage, units, state.where);
  if (state.final_units) finish_lease(cooperative_groups::this_thread_block(), store, state.final_units);
}

// Out of line: rare, and not to cost the other tiles a register.
template <class Config>
__device__ __noinline__ void compress_edge_tile(const void* in, void* out, std::int64_t numel, const BlobStore& store) {
  const std::uint32_t from = offset_in_chunk(in), to = offset_in_chunk(out);
  if ((to == 0 || to == from) && tile_may_shift<Config::kBytes>(this_tile(), numel))
    compress_tile<Config, Access::shifted>(in, out, numel, store);
  else
    compress_tile<Config, Access::elements>(in, out, numel, store);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, resident_blocks(Target::kCompress, Config::kDType))
    compress_kernel(const void* in, void* out, std::int64_t numel, const __grid_constant__ BlobStore store) {
  const std::uintptr_t addresses = reinterpret_cast<std::uintptr_t>(in) | reinterpret_cast<std::uintptr_t>(out);
  if (tile_is_whole<Config::kBytes>(addresses, this_tile(), numel))
    compress_tile<Config, Access::whole>(in, out, numel, store);
  else
    compress_edge_tile<Config>(in, out, numel, store);
}

}  // namespace bitsparse::kernels
