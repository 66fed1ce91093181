// A block's mask: lane l holds mask word l. Flat and two-level forms in shared memory.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"

namespace bitsparse::kernels {

// The mask bits of one word of a lane (its j-th), given all-ones elements where kept.
template <int Bytes>
__device__ __forceinline__ std::uint32_t mask_bits(std::uint32_t kept, int j) {
  if constexpr (Bytes == 4) return kept & (1u << j);
  if constexpr (Bytes == 2) return kept & (0x00010001u << j);
  // The product gathers the four top bits in bits 28..31.
  if constexpr (Bytes == 1) return ((kept & 0x80808080u) * 0x00204081u >> 28) << (4 * j);
}

// Is the k-th element of the lane's j-th word kept?
template <int Bytes>
__device__ __forceinline__ bool mask_test(std::uint32_t mask, int j, int k) {
  return mask & (1u << BlockLayout<Bytes>::mask_bit(j * (4 / Bytes) + k));
}

__device__ __forceinline__ std::uint32_t two_level_words(std::uint32_t nonzero_bytes) {
  return kPresenceWords + ((nonzero_bytes + 3) >> 2);
}

// Words of the two-level form of this warp's mask.
__device__ __forceinline__ std::uint32_t two_level_words_of(std::uint32_t mask) {
  std::uint32_t nonzero = 0;
#pragma unroll
  for (int b = 0; b < kPresenceWords; ++b) nonzero += __popc(__ballot_sync(~0u, mask & (0xffu << (8 * b))));
  return two_level_words(nonzero);
}

__device__ __forceinline__ void write_two_level(std::uint32_t* out, std::uint32_t mask, int lane) {
  const std::uint32_t lanes_below = (1u << lane) - 1;
  std::uint8_t* bytes = reinterpret_cast<std::uint8_t*>(out + kPresenceWords);
  std::uint32_t written = 0;
#pragma unroll
  for (int b = 0; b < kPresenceWords; ++b) {
    const std::uint32_t byte = (mask >> (8 * b)) & 0xff;
    const std::uint32_t present = __ballot_sync(~0u, byte != 0);
    if (byte) bytes[written + __popc(present & lanes_below)] = static_cast<std::uint8_t>(byte);
    if (lane == b) out[b] = present;
    written += __popc(present);
  }
  if (lane < (-written & 3)) bytes[written + lane] = 0;
}

// Returns the lane's mask word; `words` is the size of the form read.
__device__ __forceinline__ std::uint32_t read_two_level(const std::uint32_t* in, int lane, std::uint32_t& words) {
  const std::uint32_t lanes_below = (1u << lane) - 1;
  const std::uint8_t* bytes = reinterpret_cast<const std::uint8_t*>(in + kPresenceWords);
  std::uint32_t mask = 0, read = 0;
#pragma unroll
  for (int b = 0; b < kPresenceWords; ++b) {
    const std::uint32_t present = in[b];
    if ((present >> lane) & 1)
      mask |= static_cast<std::uint32_t>(bytes[read + __popc(present & lanes_below)]) << (8 * b);
    read += __popc(present);
  }
  words = two_level_words(read);
  return mask;
}

}  // namespace bitsparse::kernels
