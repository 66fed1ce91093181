// A block's mask: each lane of a warp holds its own words. Flat and two-level forms in shared memory.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/bits.cuh"
#include "device/ptx.cuh"
#include "device/slot_type.cuh"

namespace bitsparse::kernels {

// All bits of the bytes that the low four bits of a mask stand for.
__device__ __forceinline__ std::uint32_t kept_bytes(std::uint32_t mask) {
  return (((mask & 15) * 0x00204081u) & 0x01010101u) * 0xff;
}

template <int Bytes>
struct LaneMask {
  static constexpr int kWords = BlockLayout<Bytes>::kLaneMaskWords;
  std::uint32_t words[kWords];

  static __device__ __forceinline__ LaneMask filled_with(std::uint32_t word) {
    LaneMask mask;
#pragma unroll
    for (std::uint32_t& w : mask.words) w = word;
    return mask;
  }
  // The word with the bits of the elements in the lane's j-th word.
  __device__ __forceinline__ std::uint32_t& of(int j) { return words[j * (4 / Bytes) / 32]; }
  __device__ __forceinline__ std::uint32_t of(int j) const { return words[j * (4 / Bytes) / 32]; }
  // All bits of the kept elements of the lane's j-th word.
  __device__ __forceinline__ std::uint32_t kept_in(int j) const {
    if constexpr (Bytes == 1) return kept_bytes(of(j) >> (4 * j % 32));
    if constexpr (Bytes == 2) return permute_bytes(of(j) << (15 - j), 0, 0xbb99);  // the top bits of bytes 1 and 3
    return of(j) >> j & 1 ? ~0u : 0;
  }
  __device__ __forceinline__ std::uint32_t kept() const {
    std::uint32_t count = 0;
#pragma unroll
    for (std::uint32_t word : words) count += __popc(word);
    return count;
  }
};

// The mask bits of the lane's j-th word of larger elements, given all-ones elements where kept.
template <int Bytes>
__device__ __forceinline__ std::uint32_t mask_bits(std::uint32_t kept, int j) {
  static_assert(Bytes > 1);
  return kept & ((Bytes == 2 ? 0x00010001u : 1u) << j);
}

// The mask bits of a word of larger elements that are kept unless they are zero. To be added: one instruction with the
// shift.
template <int Bytes>
__device__ __forceinline__ std::uint32_t nonzero_mask_bits(std::uint32_t x, int j) {
  static_assert(Bytes > 1);
  return (Bytes == 2 ? __vminu2(x, 0x00010001u) : min(x, 1u)) << j;
}

// Those of the lane's i-th chunk of bytes, at their place in the mask word: sums of products with bytes that are 0 or
// -1; the factors are -1, -2, -4, -8 for the bits of one nibble and 16 times as much for the next.
__device__ __forceinline__ std::uint32_t byte_mask_bits(const std::uint32_t (&kept)[4], int i) {
  const auto byte = [](std::uint32_t low, std::uint32_t high) {
    const int nibble = __dp4a(static_cast<int>(low), static_cast<int>(0xf8fcfeffu), 0);
    return static_cast<std::uint32_t>(__dp4a(static_cast<int>(high), static_cast<int>(0x80c0e0f0u), nibble));
  };
  const std::uint32_t bits = byte(kept[2], kept[3]) * 256 + byte(kept[0], kept[1]);
  return i % 2 ? bits << 16 : bits;
}

// The lowest bit of every nibble that is not zero.
__device__ __forceinline__ std::uint32_t nonzero_nibbles(std::uint32_t x) {
  x |= x >> 1;
  return (x | x >> 2) & 0x11111111u;
}

// Kept elements, mask nibbles that are not zero, and lanes with a negative kept element, of a lane or summed over
// lanes: side by side in a word, so that one scan of a warp serves all.
struct MaskCounts {
  static constexpr int kNibbleShift = 16, kSignShift = 26;
  std::uint32_t packed;
  __device__ __forceinline__ std::uint32_t kept() const { return packed & 0xffff; }
  __device__ __forceinline__ std::uint32_t nibbles() const { return packed << (32 - kSignShift) >> (48 - kSignShift); }
  __device__ __forceinline__ bool signs() const { return packed >> kSignShift; }
};

template <bool Nibbles, int Bytes>
__device__ __forceinline__ MaskCounts count_mask(const LaneMask<Bytes>& mask, bool signs) {
  const std::uint32_t kept = mask.kept() + (signs ? 1u << MaskCounts::kSignShift : 0);
  if constexpr (!Nibbles) return {kept};
  std::uint32_t nibbles = 0;
#pragma unroll
  for (std::uint32_t word : mask.words) nibbles += __popc(nonzero_nibbles(word));
  return {kept + (nibbles << MaskCounts::kNibbleShift)};
}

// The nibbles of a mask word that are not zero, side by side from bit 0 on, and a presence bit for each of the eight.
struct Nibbles {
  std::uint32_t nibbles, presence;
};
__device__ __forceinline__ Nibbles collect_nibbles(std::uint32_t x) {
  const std::uint32_t nonzero = nonzero_nibbles(x);
  const std::uint32_t low = nonzero & 0x01010101u, high = nonzero >> 4 & 0x01010101u;  // one in each byte
  // In each byte the first nibble that is not zero moves down; then the bytes move together.
  const std::uint32_t has_low = low * 0xff;
  x = (x & has_low) | ((x >> 4 & 0x0f0f0f0fu) & ~has_low);
  const std::uint32_t begins = (low + high) * (kNibbleBits * 0x01010100u);
  const auto moved = [&](int byte) {
    return __funnelshift_l(0, permute_bytes(x, 0, 0x4440 + byte),
                           begins >> (8 * byte));  // by the count's low five bits
  };
  return {(x & 0xff) | moved(1) | moved(2) | moved(3), __dp4a(low, 0x40100401u, __dp4a(high, 0x80200802u, 0u))};
}

// Warp-wide: the flat form, and back. What is read from is a pointer, or like one.
template <int Bytes>
__device__ __forceinline__ void write_flat(std::uint32_t* out, const LaneMask<Bytes>& mask, int lane) {
#pragma unroll
  for (int w = 0; w < LaneMask<Bytes>::kWords; ++w) out[w * kLanes + lane] = mask.words[w];
}
template <int Bytes, class Words>
__device__ __forceinline__ LaneMask<Bytes> read_flat(const Words& in, int lane) {
  LaneMask<Bytes> mask;
#pragma unroll
  for (int w = 0; w < LaneMask<Bytes>::kWords; ++w) mask.words[w] = in[w * kLanes + lane];
  return mask;
}

// Warp-wide: the two-level form of `words` words. `before`: nibbles of lower lanes.
template <int Bytes>
__device__ __forceinline__ void write_two_level(std::uint32_t* out, std::uint32_t words, const LaneMask<Bytes>& mask,
                                                std::uint32_t before, int lane) {
  using L = BlockLayout<Bytes>;
  constexpr int kWords = L::kLaneMaskWords;
  std::uint32_t* nibbles = out + L::kPresenceWords;
#pragma unroll
  for (int w = 0; w < kWords; ++w)
    if (w * kLanes + lane < words - L::kPresenceWords) nibbles[w * kLanes + lane] = 0;
  std::uint32_t own[kWords], presence = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const Nibbles collected = collect_nibbles(mask.words[w]);
    own[w] = collected.nibbles;
    presence |= collected.presence << (8 * w);
  }
  reinterpret_cast<Slot<kWords>*>(out)[lane] = static_cast<Slot<kWords>>(presence);
  __syncwarp();
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    or_bits(nibbles, kNibbleBits * before, own[w]);
    before += __popc(presence >> (8 * w) & 0xff);
  }
}

// The presence bits of the lane's mask word w, given those of all its words.
template <int Bytes>
__device__ __forceinline__ std::uint32_t presence_byte(std::uint32_t presence, int w) {
  return LaneMask<Bytes>::kWords == 1 ? presence : presence >> (8 * w) & 0xff;
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

// The lane's presence bits, a byte for each mask word.
template <int Words>
__device__ __forceinline__ std::uint32_t presence_of_lane(const std::uint32_t* in, int lane) {
  return reinterpret_cast<const Slot<Words>*>(in)[lane];
}
template <int Words, class Source>
__device__ __forceinline__ std::uint32_t presence_of_lane(const Source& in, int lane) {
  constexpr int kLanesPerWord = 4 / Words, kBits = 8 * Words;
  return in[lane / kLanesPerWord] >> (kBits * (lane % kLanesPerWord)) & ((1u << kBits) - 1);
}

// Warp-wide: the lane's mask; `words` is the size of the form read.
template <int Bytes, class Words>
__device__ __forceinline__ LaneMask<Bytes> read_two_level(const Words& in, int lane, std::uint32_t& words) {
  using L = BlockLayout<Bytes>;
  const std::uint32_t presence = presence_of_lane<L::kLaneMaskWords>(in, lane);
  const std::uint32_t own = __popc(presence), through = warp_inclusive_sum(own);
  std::uint32_t before = through - own;
  LaneMask<Bytes> mask;
#pragma unroll
  for (int w = 0; w < L::kLaneMaskWords; ++w) {
    mask.words[w] = read_bits(in + L::kPresenceWords, kNibbleBits * before);
    before += __popc(presence_byte<Bytes>(presence, w));
  }
  words = L::two_level_words(__shfl_sync(~0u, through, kLanes - 1));
#pragma unroll
  for (int w = 0; w < L::kLaneMaskWords; ++w)
    mask.words[w] = spread_nibbles(mask.words[w], presence_byte<Bytes>(presence, w));
  return mask;
}

}  // namespace bitsparse::kernels
