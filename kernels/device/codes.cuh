// Codes: packing whole elements, side by side, to `width` bits each, and back.
//
// One step of a warp takes 8 bytes of elements a lane: 8 / 4 / 2 codes, so 32 to 64 bits, and 32 lanes fill a whole
// number of words. As a lane never has fewer than 32 bits, a word holds bits of at most two lanes: one shuffle
// completes it.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/ptx.cuh"

namespace bitsparse::kernels {

template <int Bytes>
struct Codes {
  static constexpr std::uint32_t kPerLane = 8 / Bytes;
  static constexpr std::uint32_t kPerStep = kPerLane * kLanes;

  // The pattern in every element of a word.
  static __device__ __forceinline__ std::uint32_t repeat(std::uint32_t pattern) {
    if constexpr (Bytes == 1) return pattern * 0x01010101u;
    if constexpr (Bytes == 2) return pattern * 0x00010001u;
    return pattern;
  }

  // What is above the reference, 0 where padding is below it. Bytes are padded with the reference.
  static __device__ __forceinline__ std::uint32_t above(std::uint32_t x, std::uint32_t repeated_reference) {
    if constexpr (Bytes == 1) return x - repeated_reference;
    if constexpr (Bytes == 2) return __vmaxu2(x, repeated_reference) - repeated_reference;
    return max(x, repeated_reference) - repeated_reference;
  }

  // Closes the gaps between the codes of one word: (4 / Bytes) * width bits.
  static __device__ __forceinline__ std::uint32_t close_gaps(std::uint32_t x, std::uint32_t width) {
    if constexpr (Bytes == 1) {
      x += ((x >> 8) & 0x00ff00ffu) * ((1u << width) - 256u);
      x += (x >> 16) * ((1u << (2 * width)) - 65536u);
    }
    if constexpr (Bytes == 2) x += (x >> 16) * ((1u << width) - 65536u);
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

  // Slots [0..count) less the reference -> codes of `width` bits at `out`. Slots up to the next multiple of kPerLane
  // are padding.
  static __device__ __forceinline__ void pack(const std::uint32_t* slots, std::uint32_t count, std::uint32_t width,
                                              std::uint32_t reference, std::uint32_t* out, std::uint32_t out_words,
                                              int lane) {
    const std::uint32_t lane_bits = kPerLane * width, shift = (lane_bits * lane) & 31, word_bits = lane_bits / 2;
    const bool reaches_third = shift + lane_bits >= 64;
    const std::uint32_t base = repeat(reference);
    if constexpr (Bytes == 1) {
      if (width == 8) {  // with signs, the usual case
#pragma unroll 1
        for (std::uint32_t i = lane; i < out_words; i += kLanes) out[i] = slots[i] - base;
        return;
      }
    }
    const std::uint32_t* const end = out + out_words;
    std::uint32_t* to = out + ((lane_bits * lane) >> 5);
    const uint2* from = reinterpret_cast<const uint2*>(slots) + lane;
#pragma unroll 1
    for (std::uint32_t i = 0; i < count; i += kPerStep) {
      uint2 s = Bytes == 1 ? make_uint2(base, base) : make_uint2(0, 0);
      if (i + kPerLane * lane < count) s = *from;
      const std::uint32_t x0 = close_gaps(above(s.x, base), width), x1 = close_gaps(above(s.y, base), width);
      const std::uint32_t low = x0 | shift_left(x1, word_bits), high = shift_right(x1, 32 - word_bits);
      std::uint32_t first = low << shift;
      const std::uint32_t second = __funnelshift_l(low, high, shift), third = __funnelshift_l(high, 0, shift);
      const std::uint32_t left = __shfl_up_sync(~0u, reaches_third ? third : second, 1);
      if (lane) first |= left;
      if (to < end) to[0] = first;
      if (reaches_third && to + 1 < end) to[1] = second;
      from += kLanes;
      to += lane_bits;
    }
  }

  // The inverse; `change` is applied to each word of slots. May read two words past the codes and write up to the next
  // multiple of kPerLane slots. `Ahead`: steps that are read before the first is written.
  template <int Ahead = 1, class Words, class Change>
  static __device__ __forceinline__ void unpack(const Words& in, std::uint32_t count, std::uint32_t width,
                                                std::uint32_t reference, std::uint32_t* slots, int lane,
                                                const Change& change) {
    const std::uint32_t lane_bits = kPerLane * width, shift = (lane_bits * lane) & 31;
    const std::uint32_t word_bits = lane_bits / 2, low_bits = ~0u >> (32 - word_bits);
    const std::uint32_t base = repeat(reference);
    if constexpr (Bytes == 1) {
      if (width == 8) {
#pragma unroll 1
        for (std::uint32_t i = lane; 4 * i < count; i += kLanes) slots[i] = change(in[i] + base);
        return;
      }
    }
    auto from = in + ((lane_bits * lane) >> 5);
    uint2* to = reinterpret_cast<uint2*>(slots) + lane;
    constexpr int kStep = kPerStep;
#pragma unroll 1
    for (int left = static_cast<int>(count) - static_cast<int>(kPerLane) * lane; left > 0; left -= Ahead * kStep) {
      std::uint32_t words[Ahead][3];
#pragma unroll
      for (int a = 0; a < Ahead; ++a) {
        if (a > 0 && left <= a * kStep) break;
        words[a][0] = from[0];
        words[a][1] = from[1];
        words[a][2] = from[2];
        from += lane_bits;
      }
#pragma unroll
      for (int a = 0; a < Ahead; ++a) {
        if (a > 0 && left <= a * kStep) break;
        const std::uint32_t low = __funnelshift_r(words[a][0], words[a][1], shift);
        const std::uint32_t high = __funnelshift_r(words[a][1], words[a][2], shift);
        const std::uint32_t x0 = low & low_bits, x1 = __funnelshift_rc(low, high, word_bits) & low_bits;
        *to = make_uint2(change(open_gaps(x0, width) + base), change(open_gaps(x1, width) + base));
        to += kLanes;
      }
    }
  }
};

}  // namespace bitsparse::kernels
