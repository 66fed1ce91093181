// How a block is encoded: form of its mask, width and reference of its codes, size. The rules are those of
// docs/format.md.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/codes.cuh"
#include "device/mask.cuh"
#include "device/scalar.cuh"

namespace bitsparse::kernels {

struct BlockPlan {
  MaskKind kind;
  std::uint32_t width;
  std::uint32_t stored_reference;
  std::uint32_t mask_words;
  std::uint32_t code_words;
};

__device__ __forceinline__ std::uint32_t bit_length(std::uint32_t x) { return 32 - __clz(x); }

template <int Bytes>
__device__ __forceinline__ std::uint32_t width_of(std::uint32_t largest_code) {
  return max(static_cast<std::uint32_t>(BlockLayout<Bytes>::kMinWidth), bit_length(largest_code));
}

// Smallest and largest pattern of a run of slots; zeros don't count. `Rotate`: the slots become patterns first.
template <int Bytes, bool Rotate>
__device__ __forceinline__ void slot_range(std::uint32_t* slots, std::uint32_t count, int lane, std::uint32_t& smallest,
                                           std::uint32_t& largest) {
  std::uint32_t lo = ~0u, hi = 0;
  uint2* from = reinterpret_cast<uint2*>(slots) + lane;
#pragma unroll 1
  for (int left = static_cast<int>(count - Codes<Bytes>::kPerLane * lane); left > 0; left -= Codes<Bytes>::kPerStep) {
    uint2 s = *from;
    if constexpr (Rotate) *from = s = make_uint2(rotate_sign<Bytes>(s.x), rotate_sign<Bytes>(s.y));
    from += kLanes;
    if constexpr (Bytes == 4) {
      lo = min(lo, min(s.x - 1, s.y - 1));
      hi = max(hi, max(s.x, s.y));
    } else if constexpr (Bytes == 2) {  // a borrow only comes from a zero, after which there are only zeros
      lo = __vminu2(lo, __vminu2(s.x - 0x00010001u, s.y - 0x00010001u));
      hi = __vmaxu2(hi, __vmaxu2(s.x, s.y));
    } else {  // bytes in 16-bit lanes, which have instructions
      const std::uint32_t x0 = s.x & 0x00ff00ffu, x1 = (s.x >> 8) & 0x00ff00ffu;
      const std::uint32_t y0 = s.y & 0x00ff00ffu, y1 = (s.y >> 8) & 0x00ff00ffu;
      lo = __vminu2(
          lo, __vminu2(__vminu2(x0 - 0x00010001u, x1 - 0x00010001u), __vminu2(y0 - 0x00010001u, y1 - 0x00010001u)));
      hi = __vmaxu2(hi, __vmaxu2(__vmaxu2(x0, x1), __vmaxu2(y0, y1)));
    }
  }
  if constexpr (Bytes != 4) {
    lo = min(lo & 0xffffu, lo >> 16);
    hi = max(hi & 0xffffu, hi >> 16);
  }
  smallest = __reduce_min_sync(~0u, lo) + 1;
  largest = __reduce_max_sync(~0u, hi);
}

// With fewer kept elements a mask and codes, which are no wider than the codes of a dense block, are smaller. With B
// elements a block, (kept * width + 31) / 32 + B / 32 >= B * dense_width / 32 needs kept >= B - (B + 31) / dense_width.
template <int Bytes>
constexpr std::uint32_t kDenseLeast = BlockLayout<Bytes>::kBlockElements -
                                      (BlockLayout<Bytes>::kBlockElements + 31) / BlockLayout<Bytes>::kMinWidth;

// Warp-wide. `slots`: the kept patterns, or with `Rotate` elements that become patterns, padded with zeros; asked of
// `tight` only. `counts`: with signs, for `signless`. `whole`: every index of the block is inside the tensor.
template <int Bytes, Codec C, bool Rotate>
__device__ __forceinline__ BlockPlan plan_block(std::uint32_t* slots, MaskCounts counts, bool whole, int lane) {
  using L = BlockLayout<Bytes>;
  const std::uint32_t kept = counts.kept();
  if (kept == 0) return {MaskKind::empty, L::kMinWidth, 0, 0, 0};
  BlockPlan plan{MaskKind::flat, L::kBits, 0, L::kFlatMaskWords, 0};
  if constexpr (may_be_two_level(C)) {
    const std::uint32_t two_level = L::two_level_words(counts.nibbles());
    if (two_level < L::kFlatMaskWords) {
      plan.kind = MaskKind::two_level;
      plan.mask_words = two_level;
    }
  }
  std::uint32_t largest = ~0u >> (32 - L::kBits);
  if constexpr (C == Codec::signless) largest = counts.signs() ? largest : largest >> 1;
  if constexpr (C == Codec::tight) {
    std::uint32_t smallest;
    slot_range<Bytes, Rotate>(slots, kept, lane, smallest, largest);
    plan.stored_reference = smallest >> L::kReferenceDrop;
  }
  plan.width = width_of<Bytes>(largest - (plan.stored_reference << L::kReferenceDrop));
  plan.code_words = (kept * plan.width + 31) >> 5;
  if (whole && kept >= kDenseLeast<Bytes>) {
    const std::uint32_t dense_width = width_of<Bytes>(largest);
    const std::uint32_t dense_words = L::kLaneElements * dense_width;
    if (plan.mask_words + plan.code_words >= dense_words) plan = {MaskKind::dense, dense_width, 0, 0, dense_words};
  }
  return plan;
}

}  // namespace bitsparse::kernels
