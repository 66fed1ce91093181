// The compress kernel: one pass over the input, one warp a block, one thread block a tile.
//
// A warp loads its block, writes the activation, and knows the block's size after a scan of kept counts. Blobs are
// assembled in shared memory and leave it by one bulk copy. Two barriers: all sizes known; blob complete.
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
#include "launch.h"
#include "tuning.h"

namespace bitsparse::kernels {

template <DType D, Codec C, Keep K, Epilogue E>
struct CompressConfig {
  static constexpr DType kDType = D;
  static constexpr Codec kCodec = C;
  static constexpr Keep kKeep = K;
  static constexpr Epilogue kEpilogue = E;
  static constexpr int kBytes = Scalar<D>::kBytes;
  static constexpr bool kRotates = rotates_sign(C, K);
  using L = BlockLayout<kBytes>;
  static constexpr int kThreads = L::kBlocksPerTile * kLanes;
  static constexpr int kStageWords = (L::kMaxTileWords + 3) / 4 * 4;
  // `raw` codes go straight to their place; the other codecs first gather a block's kept elements.
  static constexpr int kSharedBytes =
      4 * (kStageWords + (C == Codec::raw ? 0 : L::kBlocksPerTile * Codes<kBytes>::kScratchWords));
};

// Stores the kept (so non-zero) elements of a word to consecutive slots from shared address `p` on.
template <DType D, Keep K>
__device__ __forceinline__ void scatter_word(std::uint32_t& p, std::uint32_t x) {
  constexpr int kBytes = Scalar<D>::kBytes;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (D == DType::bfloat16 && K == Keep::positive) {
    asm volatile(
        "{.reg .pred p, q; .reg .b16 l, h; setp.gtu.bf16x2 p|q, %1, %2; mov.b32 {l, h}, %1;"
        " @p st.shared.b16 [%0], l; @p add.u32 %0, %0, 2; @q st.shared.b16 [%0], h; @q add.u32 %0, %0, 2;}"
        : "+r"(p)
        : "r"(x), "r"(0u)
        : "memory");
    return;
  }
#endif
  if constexpr (D == DType::float16 && K == Keep::positive) {
    asm volatile(
        "{.reg .pred p, q; .reg .b16 l, h; setp.gtu.f16x2 p|q, %1, %2; mov.b32 {l, h}, %1;"
        " @p st.shared.b16 [%0], l; @p add.u32 %0, %0, 2; @q st.shared.b16 [%0], h; @q add.u32 %0, %0, 2;}"
        : "+r"(p)
        : "r"(x), "r"(0u)
        : "memory");
    return;
  }
  if constexpr (kBytes == 4) {
    if (x) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(p), "r"(x) : "memory");
      p += 4;
    }
  } else {
#pragma unroll
    for (int k = 0; k < 4 / kBytes; ++k) {
      const std::uint32_t slot = (x >> (k * 8 * kBytes)) & ((1u << (8 * kBytes)) - 1);
      if (slot) {
        if constexpr (kBytes == 2)
          asm volatile("st.shared.u16 [%0], %1;" ::"r"(p), "h"(static_cast<std::uint16_t>(slot)) : "memory");
        if constexpr (kBytes == 1) asm volatile("st.shared.u8 [%0], %1;" ::"r"(p), "r"(slot) : "memory");
        p += kBytes;
      }
    }
  }
}

// What a lane holds of its warp's block: elements that are not kept are zero.
template <class Config>
struct LaneBlock {
  using L = typename Config::L;
  uint4 elements[L::kChunksPerLane];
  std::uint32_t mask;
  std::uint32_t first_slot;  // kept elements of lower lanes
  std::uint32_t kept;        // of the whole block
  bool signs;                // some kept value of the block is negative; known for `signless`
};

// Loads the block, writes its activation, and leaves the kept elements' patterns in the order of their codes.
template <class Config, bool Whole>
__device__ __forceinline__ void read_block(const void* in, void* out, std::int64_t first, std::int64_t numel, int lane,
                                           LaneBlock<Config>& block) {
  using L = typename Config::L;
  constexpr int kBytes = Config::kBytes;
  constexpr Epilogue E = Config::kEpilogue;
  load_block<kBytes, Whole, true>(in, first, numel, lane, block.elements);
  block.mask = 0;
  std::uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < L::kChunksPerLane; ++i) {
    std::uint32_t* x = reinterpret_cast<std::uint32_t*>(&block.elements[i]);
    std::uint32_t activation[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::uint32_t kept = keep_mask<Config::kDType, Config::kKeep>(x[j]);
      block.mask |= mask_bits<kBytes>(kept, 4 * i + j);
      x[j] &= kept;
      if constexpr (Config::kCodec == Codec::signless) any |= x[j];
      if constexpr (E != Epilogue::none) activation[j] = activate<Config::kDType, E>(x[j]);
      if constexpr (Config::kRotates) x[j] = rotate_sign<kBytes>(x[j]);
    }
    if constexpr (E != Epilogue::none) store_chunk<kBytes, Whole, false>(out, first, numel, lane, i, activation);
  }
  const std::uint32_t lane_kept = __popc(block.mask);
  const std::uint32_t inclusive = warp_inclusive_sum(lane_kept);
  block.first_slot = inclusive - lane_kept;
  block.kept = __shfl_sync(~0u, inclusive, 31);
  block.signs = false;
  if constexpr (Config::kCodec == Codec::signless) {
    constexpr std::uint32_t kSigns = kBytes == 4 ? 0x80000000u : kBytes == 2 ? 0x80008000u : 0x80808080u;
    block.signs = __any_sync(~0u, any & kSigns);
  }
}

// The block's kept elements, side by side at `to`.
template <class Config>
__device__ __forceinline__ void gather_kept(const LaneBlock<Config>& block, std::uint32_t* to) {
  std::uint32_t p = shared_address(to) + block.first_slot * Config::kBytes;
#pragma unroll
  for (const uint4& chunk : block.elements) {
    scatter_word<Config::kDType, Config::kKeep>(p, chunk.x);
    scatter_word<Config::kDType, Config::kKeep>(p, chunk.y);
    scatter_word<Config::kDType, Config::kKeep>(p, chunk.z);
    scatter_word<Config::kDType, Config::kKeep>(p, chunk.w);
  }
}

// All elements of the block, side by side at `to`.
template <class Config>
__device__ __forceinline__ void gather_all(const LaneBlock<Config>& block, std::uint32_t* to, int lane) {
  std::uint32_t* p = to + lane * 4 * Config::L::kChunksPerLane;
#pragma unroll
  for (const uint4& chunk : block.elements) {
    *p++ = chunk.x;
    *p++ = chunk.y;
    *p++ = chunk.z;
    *p++ = chunk.w;
  }
}

// Mask and codes of a planned block. `slots` holds what is to be coded, but for `raw`, whose codes are the elements
// themselves.
template <class Config>
__device__ __forceinline__ void write_body(const LaneBlock<Config>& block, const BlockPlan& plan, std::uint32_t* slots,
                                           std::uint32_t* body, int lane) {
  constexpr int kBytes = Config::kBytes;
  if (plan.kind == MaskKind::flat) body[lane] = block.mask;
  if (plan.kind == MaskKind::two_level) write_two_level(body, block.mask, lane);
  std::uint32_t* codes = body + plan.mask_words;
  if constexpr (Config::kCodec == Codec::raw) {
    if (plan.kind == MaskKind::dense) return gather_all(block, codes, lane);
    gather_kept(block, codes);
    constexpr std::uint32_t kPerWord = 4 / kBytes;
    if (lane < (-block.kept & (kPerWord - 1))) reinterpret_cast<Slot<kBytes>*>(codes)[block.kept + lane] = 0;
  } else if (plan.kind != MaskKind::empty) {
    const std::uint32_t count = plan.kind == MaskKind::dense ? kBlockElements : block.kept;
    const std::uint32_t reference = plan.stored_reference << Config::L::kReferenceDrop;
    pad_slots<kBytes>(slots, count, reference, lane);
    Codes<kBytes>::pack(slots, count, plan.width, reference, codes, plan.code_words, lane);
  }
}

// Block-wide: the finished blob from shared memory to its place. Holds the second barrier.
__device__ __forceinline__ void store_blob(const std::uint32_t* stage, std::uint32_t units, const Placement& where) {
#if BITSPARSE_BULK_COPY
  fence_shared_to_bulk();
  __syncthreads();  // blob complete
  if (threadIdx.x == 0 && !where.lost) {
    bulk_store(where.first, shared_address(stage), where.first_units * kUnitBytes);
    if (where.first_units < units)
      bulk_store(where.second, shared_address(stage) + where.first_units * kUnitBytes,
                 (units - where.first_units) * kUnitBytes);
    bulk_store_wait();
  }
#else
  __syncthreads();  // blob complete
  if (where.lost) return;
  for (std::uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
    std::uint8_t* to =
        i < where.first_units ? where.first + i * kUnitBytes : where.second + (i - where.first_units) * kUnitBytes;
    *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4*>(stage)[i];
  }
#endif
}

template <class Config, bool Whole>
__device__ __forceinline__ void compress_tile(const void* in, void* out, std::int64_t numel, const BlobStore& store) {
  using L = typename Config::L;
  constexpr int kBlocks = L::kBlocksPerTile;
  extern __shared__ __align__(128) std::uint32_t shared[];
  __shared__ __align__(16) std::uint32_t block_words[kBlocks];
  __shared__ std::uint32_t block_kept[kBlocks];
  __shared__ Placement where;
  __shared__ std::uint64_t final_units;  // 0: not the tile that reserved last
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  std::uint32_t* stage = shared;
  std::uint32_t* slots = shared + Config::kStageWords + warp * Codes<Config::kBytes>::kScratchWords;

  if (blockIdx.x == 0 && store.prefill) prefill_pages(store.pool, store.pages, store.prefill);

  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * kBlocks + warp) * kBlockElements;
  LaneBlock<Config> block;
  read_block<Config, Whole>(in, out, first, numel, lane, block);
  if constexpr (Config::kCodec != Codec::raw) {
    gather_kept(block, slots);
    __syncwarp();
  }
  const bool full = Whole || first + kBlockElements <= numel;
  const BlockPlan plan =
      plan_block<Config::kBytes, Config::kCodec>(block.mask, block.kept, block.signs, slots, full, lane);
  if (Config::kCodec != Codec::raw && plan.kind == MaskKind::dense) {
    __syncwarp();
    gather_all(block, slots, lane);
    __syncwarp();
  }
  if (lane == 0) {
    block_words[warp] = plan.mask_words + plan.code_words;
    block_kept[warp] = block.kept;
  }
  __syncthreads();  // all sizes known

  std::uint32_t offset = kBlocks, total = kBlocks;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const std::uint32_t words = block_words[i];
    if (i < warp) offset += words;
    total += words;
  }
  const std::uint32_t units = (total + 3) >> 2;
  std::uint64_t reserved = 0;
  bool last = false;
  if (threadIdx.x == 0) reserved = reserve_units(store, units, gridDim.x, last);  // needed after the codes are written
  if (lane == 0) stage[warp] = L::make_header(offset, plan.width, plan.kind, plan.stored_reference);
  if (threadIdx.x < units * 4 - total) stage[total + threadIdx.x] = 0;
  write_body(block, plan, slots, stage + offset, lane);

  if (threadIdx.x == 0) {
    final_units = last ? reserved + units : 0;
    std::uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) kept += block_kept[i];
    place_blob(store, reserved, units, kept, &where);
  }
  store_blob(stage, units, where);
  if (final_units) finish_lease(store, final_units);
}

// Out of line: rare, and not to cost the other tiles a register.
template <class Config>
__device__ __noinline__ void compress_edge_tile(const void* in, void* out, std::int64_t numel, const BlobStore& store) {
  compress_tile<Config, false>(in, out, numel, store);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Tuning::compress_blocks(Config::kDType))
    compress_kernel(const void* in, void* out, std::int64_t numel, const __grid_constant__ BlobStore store) {
  const std::uintptr_t addresses = reinterpret_cast<std::uintptr_t>(in) | reinterpret_cast<std::uintptr_t>(out);
  if (tile_is_whole<Config::kBytes>(reinterpret_cast<const void*>(addresses), blockIdx.x, numel))
    compress_tile<Config, true>(in, out, numel, store);
  else
    compress_edge_tile<Config>(in, out, numel, store);
}

}  // namespace bitsparse::kernels
