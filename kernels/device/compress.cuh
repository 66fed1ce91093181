// The compress kernel: one pass over the input, one warp a block, one thread block a tile.
//
// A warp loads its block, writes the activation, and knows the block's size after a scan of kept counts. Blobs are
// assembled in shared memory and leave it by one bulk copy. Two barriers: all sizes known; blob complete.
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

// Smallest and largest pattern of a run of slots.
template <int Bytes>
__device__ __forceinline__ void slot_range(const std::uint32_t* slots, std::uint32_t count, int lane,
                                           std::uint32_t& smallest, std::uint32_t& largest) {
  constexpr int kPerLane = Codes<Bytes>::kPerLane;
  std::uint32_t lo = ~0u, hi = 0;
  for (std::uint32_t i = lane; kPerLane * i < count; i += kLanes) {
    const uint2 s = reinterpret_cast<const uint2*>(slots)[i];
    if constexpr (Bytes == 4) {
      lo = min(lo, min(s.x, s.y));
      hi = max(hi, max(s.x, s.y));
    } else if constexpr (Bytes == 2) {
      lo = __vminu2(lo, __vminu2(s.x, s.y));
      hi = __vmaxu2(hi, __vmaxu2(s.x, s.y));
    } else {  // bytes in 16-bit lanes, which have instructions
      const std::uint32_t x0 = s.x & 0x00ff00ffu, x1 = (s.x >> 8) & 0x00ff00ffu;
      const std::uint32_t y0 = s.y & 0x00ff00ffu, y1 = (s.y >> 8) & 0x00ff00ffu;
      lo = __vminu2(lo, __vminu2(__vminu2(x0, x1), __vminu2(y0, y1)));
      hi = __vmaxu2(hi, __vmaxu2(__vmaxu2(x0, x1), __vmaxu2(y0, y1)));
    }
  }
  if constexpr (Bytes != 4) {
    lo = min(lo & 0xffffu, lo >> 16);
    hi = max(hi & 0xffffu, hi >> 16);
  }
  smallest = __reduce_min_sync(~0u, lo);
  largest = __reduce_max_sync(~0u, hi);
}

// Fills the slots from `count` to the next multiple of what a lane packs at once.
template <int Bytes>
__device__ __forceinline__ void pad_slots(std::uint32_t* slots, std::uint32_t count, std::uint32_t pattern, int lane) {
  constexpr std::uint32_t kPerLane = Codes<Bytes>::kPerLane;
  if (lane < (-count & (kPerLane - 1)))
    reinterpret_cast<Slot<Bytes>*>(slots)[count + lane] = static_cast<Slot<Bytes>>(pattern);
  __syncwarp();
}

// How a block is encoded.
struct BlockPlan {
  MaskKind kind;
  std::uint32_t width;
  std::uint32_t stored_reference;
  std::uint32_t mask_words;
  std::uint32_t code_words;
};

template <class Config, bool Whole>
__device__ __forceinline__ void compress_tile(const void* in, void* out, std::int64_t numel, const BlobStore& store) {
  using L = typename Config::L;
  constexpr int kBytes = Config::kBytes, kBlocks = L::kBlocksPerTile;
  constexpr DType D = Config::kDType;
  constexpr Codec C = Config::kCodec;
  constexpr Keep K = Config::kKeep;

  extern __shared__ __align__(128) std::uint32_t shared[];
  __shared__ __align__(16) std::uint32_t block_words[8];
  __shared__ std::uint32_t block_kept[8];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  std::uint32_t* stage = shared;
  std::uint32_t* slots = shared + Config::kStageWords + warp * Codes<kBytes>::kScratchWords;

  if (blockIdx.x == 0 && store.prefill) prefill_pages(store.pool, store.pages, store.prefill);

  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * kBlocks + warp) * kBlockElements;
  uint4 v[L::kChunksPerLane];
  load_block<kBytes, Whole, true>(in, first, numel, lane, v);

  // Mask and activation. From here on v holds zero where nothing is kept (and codes' bit order).
  std::uint32_t mask = 0, any = 0;
#pragma unroll
  for (int i = 0; i < L::kChunksPerLane; ++i) {
    std::uint32_t* x = reinterpret_cast<std::uint32_t*>(&v[i]);
    std::uint32_t activation[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::uint32_t kept = keep_mask<D, K>(x[j]);
      mask |= mask_bits<kBytes>(kept, 4 * i + j);
      x[j] &= kept;
      if constexpr (C == Codec::signless) any |= x[j];
      if constexpr (Config::kEpilogue != Epilogue::none) activation[j] = activate<D, Config::kEpilogue>(x[j]);
      if constexpr (Config::kRotates) x[j] = rotate_sign<kBytes>(x[j]);
    }
    if constexpr (Config::kEpilogue != Epilogue::none)
      store_chunk<kBytes, Whole, false>(out, first, numel, lane, i, activation);
  }

  const std::uint32_t lane_kept = __popc(mask);
  const std::uint32_t inclusive = warp_inclusive_sum(lane_kept);
  std::uint32_t first_slot = inclusive - lane_kept;
  const std::uint32_t kept = __shfl_sync(~0u, inclusive, 31);

  auto scatter = [&](std::uint32_t* to) {
    std::uint32_t p = shared_address(to) + first_slot * kBytes;
#pragma unroll
    for (int i = 0; i < L::kChunksPerLane; ++i) {
      scatter_word<D, K>(p, v[i].x);
      scatter_word<D, K>(p, v[i].y);
      scatter_word<D, K>(p, v[i].z);
      scatter_word<D, K>(p, v[i].w);
    }
  };

  BlockPlan plan{MaskKind::flat, L::kBits, 0, kFlatMaskWords, 0};
  std::uint32_t dense_width = L::kBits;
  if constexpr (C == Codec::signless) {
    constexpr std::uint32_t kSigns = kBytes == 4 ? 0x80000000u : kBytes == 2 ? 0x80008000u : 0x80808080u;
    plan.width = dense_width = L::kBits - (__any_sync(~0u, any & kSigns) ? 0 : 1);
  }
  if constexpr (C != Codec::raw) {
    scatter(slots);
    __syncwarp();
  }
  if constexpr (C == Codec::tight) {
    if (kept) {
      pad_slots<kBytes>(slots, kept, reinterpret_cast<const Slot<kBytes>*>(slots)[0], lane);
      std::uint32_t smallest, largest;
      slot_range<kBytes>(slots, kept, lane, smallest, largest);
      plan.stored_reference = smallest >> L::kReferenceDrop;
      plan.width = max(L::kMinWidth, 32 - __clz(largest - (plan.stored_reference << L::kReferenceDrop)));
      dense_width = max(L::kMinWidth, 32 - __clz(largest));
    }
  }
  plan.code_words = (kept * plan.width + 31) >> 5;
  const std::uint32_t two_level = two_level_words_of(mask);
  if (two_level < kFlatMaskWords) {
    plan.kind = MaskKind::two_level;
    plan.mask_words = two_level;
  }
  if (kept == 0) plan = {MaskKind::empty, L::kMinWidth, 0, 0, 0};
  if (plan.mask_words + plan.code_words >= kLanes * dense_width && (Whole || first + kBlockElements <= numel)) {
    plan = {MaskKind::dense, dense_width, 0, 0, kLanes * dense_width};
    if constexpr (C != Codec::raw) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < L::kChunksPerLane; ++i) reinterpret_cast<uint4*>(slots)[lane * L::kChunksPerLane + i] = v[i];
      __syncwarp();
    }
  }

  if (lane == 0) {
    block_words[warp] = plan.mask_words + plan.code_words;
    block_kept[warp] = kept;
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
  if (threadIdx.x == 0) reserved = reserve_units(store, units, gridDim.x, last);

  if (lane == 0) stage[warp] = L::make_header(offset, plan.width, plan.kind, plan.stored_reference);
  if (threadIdx.x < units * 4 - total) stage[total + threadIdx.x] = 0;
  std::uint32_t* body = stage + offset;
  if (plan.kind == MaskKind::flat) body[lane] = mask;
  if (plan.kind == MaskKind::two_level) write_two_level(body, mask, lane);
  std::uint32_t* codes = body + plan.mask_words;
  if constexpr (C == Codec::raw) {
    if (plan.kind == MaskKind::dense) {
      std::uint32_t* lane_codes = codes + lane * 4 * L::kChunksPerLane;
#pragma unroll
      for (int i = 0; i < L::kChunksPerLane; ++i) {
        lane_codes[4 * i] = v[i].x;
        lane_codes[4 * i + 1] = v[i].y;
        lane_codes[4 * i + 2] = v[i].z;
        lane_codes[4 * i + 3] = v[i].w;
      }
    } else {
      scatter(codes);
      constexpr std::uint32_t kPerWord = 4 / kBytes;
      if (lane < (-kept & (kPerWord - 1))) reinterpret_cast<Slot<kBytes>*>(codes)[kept + lane] = 0;
    }
  } else if (plan.kind != MaskKind::empty) {
    const std::uint32_t count = plan.kind == MaskKind::dense ? kBlockElements : kept;
    const std::uint32_t reference = plan.stored_reference << L::kReferenceDrop;
    pad_slots<kBytes>(slots, count, reference, lane);
    Codes<kBytes>::pack(slots, count, plan.width, reference, codes, plan.code_words, lane);
  }

  __shared__ Placement where;
  __shared__ std::uint64_t final_units;  // 0: not the last
  if (threadIdx.x == 0) {
    final_units = last ? reserved + units : 0;
    std::uint32_t tile_kept = 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) tile_kept += block_kept[i];
    place_blob(store, reserved, units, tile_kept, &where);
  }
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
  if (!where.lost)
    for (std::uint32_t i = threadIdx.x; i < units; i += Config::kThreads) {
      std::uint8_t* to =
          i < where.first_units ? where.first + i * kUnitBytes : where.second + (i - where.first_units) * kUnitBytes;
      *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4*>(stage)[i];
    }
#endif
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
