// How a block is encoded: the form of its mask, and width and reference of its codes. The rules are those of
// docs/format.md.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/block_io.cuh"
#include "device/codes.cuh"
#include "device/mask.cuh"

namespace bitsparse::kernels {

struct BlockPlan {
  MaskKind kind;
  std::uint32_t width;
  std::uint32_t stored_reference;
  std::uint32_t mask_words;
  std::uint32_t code_words;
};

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

// Warp-wide. `signs`: is any kept value negative; asked of `signless` only. `slots`: the kept patterns, side by side;
// asked of `tight` only. `full`: every index of the block is inside the tensor.
template <int Bytes, Codec C>
__device__ __forceinline__ BlockPlan plan_block(std::uint32_t mask, std::uint32_t kept, bool signs,
                                                std::uint32_t* slots, bool full, int lane) {
  using L = BlockLayout<Bytes>;
  BlockPlan plan{MaskKind::flat, L::kBits, 0, kFlatMaskWords, 0};
  std::uint32_t dense_width = L::kBits;
  if constexpr (C == Codec::signless) plan.width = dense_width = L::kBits - (signs ? 0 : 1);
  if constexpr (C == Codec::tight) {
    if (kept) {
      pad_slots<Bytes>(slots, kept, reinterpret_cast<const Slot<Bytes>*>(slots)[0], lane);
      std::uint32_t smallest, largest;
      slot_range<Bytes>(slots, kept, lane, smallest, largest);
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
  if (full && plan.mask_words + plan.code_words >= kLanes * dense_width)
    plan = {MaskKind::dense, dense_width, 0, 0, kLanes * dense_width};
  return plan;
}

}  // namespace bitsparse::kernels
