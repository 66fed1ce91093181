// Fields at any bit of a run of words in shared memory.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"

namespace bitsparse::kernels {

// Or-s `x` into zeroed bits from `bit` on. Several lanes may do so in one word. Predicated, not branched around.
__device__ __forceinline__ void or_bits(std::uint32_t* words, std::uint32_t bit, std::uint32_t x) {
  const std::uint32_t low = x << (bit & 31), high = __funnelshift_l(x, 0, bit & 31);
  asm volatile(
      "{.reg .pred p, q; setp.ne.u32 p, %1, 0; setp.ne.u32 q, %2, 0; @p red.shared.or.b32 [%0], %1;"
      " @q red.shared.or.b32 [%0+4], %2;}" ::"r"(shared_address(words + (bit >> 5))),
      "r"(low), "r"(high)
      : "memory");
}

// The 32 bits from `bit` on. May read one word more than they are in.
template <class Words>
__device__ __forceinline__ std::uint32_t read_bits(const Words& words, std::uint32_t bit) {
  const auto w = words + (bit >> 5);
  return __funnelshift_r(w[0], w[1], bit & 31);
}

}  // namespace bitsparse::kernels
