// A block's mask: lane l of a warp holds mask word l. Flat and two-level forms in shared memory.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/bits.cuh"
#include "device/ptx.cuh"
#include "device/scalar.cuh"

namespace bitsparse::kernels {

// Adds the mask bits of `x`, a lane's j-th word, to the lane's mask, and clears the elements of `x` that are not kept.
template <DType D, Keep K>
__device__ __forceinline__ void keep_word(std::uint32_t& x, int j, std::uint32_t& mask) {
  constexpr int kBytes = Scalar<D>::kBytes;
  if constexpr (kBytes == 1) {
    std::uint32_t kept;  // in the top bits, at least; the sum cannot carry from one byte into the next
    if constexpr (K == Keep::positive)
      x &= kept = Scalar<D>::positive_mask(x);
    else
      kept = ((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x;
    // The product gathers the four top bits in bits 28..31.
    mask |= ((kept & 0x80808080u) * 0x00204081u >> 28) << (4 * j);
  } else if constexpr (K == Keep::positive) {
    const std::uint32_t kept = Scalar<D>::positive_mask(x);
    mask |= kept & ((kBytes == 2 ? 0x00010001u : 1u) << j);
    x &= kept;
  } else {
    mask += (kBytes == 2 ? __vminu2(x, 0x00010001u) : min(x, 1u)) << j;  // adding bits: one instruction with the shift
  }
}

// Is the k-th element of the lane's j-th word kept?
template <int Bytes>
__device__ __forceinline__ bool mask_test(std::uint32_t mask, int j, int k) {
  return mask & (1u << BlockLayout<Bytes>::mask_bit(j * (4 / Bytes) + k));
}

// The lowest bit of every nibble that is not zero.
__device__ __forceinline__ std::uint32_t nonzero_nibbles(std::uint32_t x) {
  x |= x >> 1;
  return (x | x >> 2) & 0x11111111u;
}

// Kept elements and mask nibbles that are not zero, of a lane or summed over lanes: side by side in a word, so that one
// scan of a warp serves both.
struct MaskCounts {
  std::uint32_t packed;
  __device__ __forceinline__ std::uint32_t kept() const { return packed & 0xffff; }
  __device__ __forceinline__ std::uint32_t nibbles() const { return packed >> 16; }
};

template <bool Nibbles>
__device__ __forceinline__ MaskCounts count_mask(std::uint32_t mask) {
  const std::uint32_t kept = __popc(mask);
  if constexpr (!Nibbles) return {kept};
  return {kept + (static_cast<std::uint32_t>(__popc(nonzero_nibbles(mask))) << 16)};
}

// Warp-wide: the two-level form of `words` words. `before`: nibbles of lower lanes.
__device__ __forceinline__ void write_two_level(std::uint32_t* out, std::uint32_t words, std::uint32_t mask,
                                                std::uint32_t before, int lane) {
  std::uint32_t* nibbles = out + kPresenceWords;
  if (lane < words - kPresenceWords) nibbles[lane] = 0;
  const std::uint32_t nonzero = nonzero_nibbles(mask);
  // Bit 4 i to bit i, by halves.
  std::uint32_t presence = (nonzero | nonzero >> 3) & 0x03030303u;
  presence = (presence | presence >> 6) & 0x000f000fu;
  reinterpret_cast<std::uint8_t*>(out)[lane] = static_cast<std::uint8_t>(presence | presence >> 12);
  std::uint32_t own = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i)
    if (nonzero & (1u << (4 * i))) own = own << 4 | (mask >> (4 * i) & 15);
  __syncwarp();
  or_bits(nibbles, kNibbleBits * before, own);
}

// The inverse of collecting: the lowest nibbles of `x`, one for each presence bit, to the places of those bits. From
// halves to bytes to nibbles: in each the lower part's nibbles come first, and the rest begins that much higher. What
// lies beyond them is noise until the presence bits, spread to nibbles, mask it out.
__device__ __forceinline__ std::uint32_t spread_nibbles(std::uint32_t x, std::uint32_t presence) {
  const auto bits_of = [&](std::uint32_t part) { return kNibbleBits * __popc(presence & part); };
  x = __byte_perm(x, x >> bits_of(0x0f), 0x5410);
  const std::uint32_t byte1 = x >> bits_of(0x03), byte3 = x >> (16 + bits_of(0x30));
  x = __byte_perm(__byte_perm(x, byte1, 0x0240), byte3, 0x4210);
  std::uint32_t present = (presence | presence << 12) & 0x000f000fu;
  present = (present | present << 6) & 0x03030303u;
  present = ((present | present << 3) & 0x11111111u) * 15;
  const std::uint32_t low = present & 0x0f0f0f0fu, low_then_high = low << 4;
  const std::uint32_t high = (x & low_then_high) | (x << 4 & ~low_then_high);
  return (x & low) | (high & present & 0xf0f0f0f0u);
}

// Warp-wide: the lane's mask word; `words` is the size of the form read.
__device__ __forceinline__ std::uint32_t read_two_level(const std::uint32_t* in, int lane, std::uint32_t& words) {
  const std::uint32_t presence = reinterpret_cast<const std::uint8_t*>(in)[lane];
  const std::uint32_t own = __popc(presence), through = warp_inclusive_sum(own);
  const std::uint32_t nibbles = read_bits(in + kPresenceWords, kNibbleBits * (through - own));
  words = two_level_words(__shfl_sync(~0u, through, kLanes - 1));
  return spread_nibbles(nibbles, presence);
}

}  // namespace bitsparse::kernels
