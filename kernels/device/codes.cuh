// Codes: packing a run of slots (whole elements, side by side in shared memory) to `width` bits each, and back.
//
// One step of a warp takes 8 bytes of slots a lane: 8 / 4 / 2 codes, so 32 to 64 bits, and 32 lanes fill a whole number
// of words. As a lane never has fewer than 32 bits, a word holds bits of at most two lanes: one shuffle completes it.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/block_io.cuh"
#include "device/ptx.cuh"

namespace bitsparse::kernels {

template <int Bytes>
struct Codes {
  static constexpr int kPerLane = 8 / Bytes;
  static constexpr int kPerStep = kPerLane * kLanes;
  static constexpr int kScratchWords =
      BlockLayout<Bytes>::kBlockWords + 8;  // slots of a block, and what a step reads past them

  // The pattern in every slot of a word.
  static __device__ __forceinline__ std::uint32_t repeat(std::uint32_t pattern) {
    if constexpr (Bytes == 1) return pattern * 0x01010101u;
    if constexpr (Bytes == 2) return pattern * 0x00010001u;
    return pattern;
  }

  // Closes the gaps between the codes of one word: (4 / Bytes) * width bits.
  static __device__ __forceinline__ std::uint32_t close_gaps(std::uint32_t x, std::uint32_t width) {
    if constexpr (Bytes == 1) {
      x -= ((x >> 8) & 0x00ff00ffu) * (256u - (1u << width));
      x -= (x >> 16) * (65536u - (1u << (2 * width)));
    }
    if constexpr (Bytes == 2) x -= (x >> 16) * (65536u - (1u << width));
    return x;
  }
  static __device__ __forceinline__ std::uint32_t open_gaps(std::uint32_t x, std::uint32_t width) {
    if constexpr (Bytes == 1) {
      x += (x >> (2 * width)) * (65536u - (1u << (2 * width)));
      const std::uint32_t low = 0x00010001u * ((1u << width) - 1);
      x += ((x & ~low) >> width) * (256u - (1u << width));
    }
    if constexpr (Bytes == 2) x += (x >> width) * (65536u - (1u << width));
    return x;
  }

  // slots[0..count) -> codes of `width` bits at `out`. Slots up to the next multiple of kPerLane hold the reference.
  static __device__ __forceinline__ void pack(const std::uint32_t* slots, std::uint32_t count, std::uint32_t width,
                                              std::uint32_t reference, std::uint32_t* out, std::uint32_t out_words,
                                              int lane) {
    const std::uint32_t lane_bits = kPerLane * width, shift = (lane_bits * lane) & 31;
    const std::uint32_t word_bits = lane_bits / 2;
    const bool reaches_third = shift + lane_bits >= 64;
    const std::uint32_t base = repeat(reference), has_left = lane ? ~0u : 0u;
    std::uint32_t at = (lane_bits * lane) >> 5;
    for (std::uint32_t i = 0; i < count; i += kPerStep) {
      uint2 s = make_uint2(base, base);
      if (i + kPerLane * lane < count)
        s = *reinterpret_cast<const uint2*>(reinterpret_cast<const Slot<Bytes>*>(slots) + i + kPerLane * lane);
      // No borrow crosses slots, as no kept pattern is below the reference.
      const std::uint32_t x0 = close_gaps(s.x - base, width), x1 = close_gaps(s.y - base, width);
      const std::uint32_t low = x0 | shift_left(x1, word_bits), high = shift_right(x1, 32 - word_bits);
      std::uint32_t first = low << shift;
      const std::uint32_t second = __funnelshift_l(low, high, shift), third = __funnelshift_l(high, 0, shift);
      first |= __shfl_up_sync(~0u, reaches_third ? third : second, 1) & has_left;
      if (at < out_words) out[at] = first;
      if (reaches_third && at + 1 < out_words) out[at + 1] = second;
      at += lane_bits;
    }
  }

  // The inverse. May read up to two words past the codes.
  static __device__ __forceinline__ void unpack(const std::uint32_t* in, std::uint32_t count, std::uint32_t width,
                                                std::uint32_t reference, std::uint32_t* slots, int lane) {
    const std::uint32_t lane_bits = kPerLane * width, shift = (lane_bits * lane) & 31;
    const std::uint32_t word_bits = lane_bits / 2, low_bits = ~0u >> (32 - word_bits);
    const std::uint32_t base = repeat(reference);
    const std::uint32_t* q = in + ((lane_bits * lane) >> 5);
    for (std::uint32_t i = kPerLane * lane; i < count; i += kPerStep) {
      const std::uint32_t low = __funnelshift_r(q[0], q[1], shift), high = __funnelshift_r(q[1], q[2], shift);
      const std::uint32_t x0 = low & low_bits, x1 = __funnelshift_rc(low, high, word_bits) & low_bits;
      *reinterpret_cast<uint2*>(reinterpret_cast<Slot<Bytes>*>(slots) + i) =
          make_uint2(open_gaps(x0, width) + base, open_gaps(x1, width) + base);
      q += lane_bits;
    }
  }
};

}  // namespace bitsparse::kernels
