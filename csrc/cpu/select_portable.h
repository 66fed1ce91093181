// Element selection in plain loops that compilers vectorise where they can.
#pragma once

#include "cpu/simd_common.h"

namespace bitsparse::cpu::BITSPARSE_ISA {

// Eight flags (bytes 0 or 1) to eight bits.
inline std::uint8_t flag_bits(const std::uint8_t* flags) {
  return static_cast<std::uint8_t>(load<std::uint64_t>(flags) * 0x0102040810204080u >> 56);
}

// With fewer kept elements than this, visiting the set bits is faster than looking at all elements.
template <int Bytes>
constexpr int kSparseLimit = 2 * BlockLayout<Bytes>::kBlockElements / 5;

template <int Bytes>
inline void flags_to_masks(const std::uint8_t* flags, std::uint32_t* masks) {
  for (int i = 0; i < BlockLayout<Bytes>::kFlatMaskWords; ++i) {
    std::uint32_t mask = 0;
    for (int byte = 0; byte < 4; ++byte) {
      mask |= static_cast<std::uint32_t>(flag_bits(flags + 32 * i + 8 * byte)) << (8 * byte);
    }
    masks[i] = mask;
  }
}

// Calls f(i) for the elements i, in lane-major order, whose bits are set.
template <int Bytes, class F>
inline void for_each_kept(const std::uint32_t* masks, F f) {
  for (int i = 0; i < BlockLayout<Bytes>::kFlatMaskWords; i += 2) {
    std::uint64_t mask = masks[i] | static_cast<std::uint64_t>(masks[i + 1]) << 32;
    for (; mask; mask &= mask - 1) f(32 * i + __builtin_ctzll(mask));
  }
}

template <int Bytes>
inline bool is_kept(Uint<Bytes> x, Uint<Bytes> threshold) {
  return (static_cast<Int<Bytes>>(x) > 0) | (x > threshold);
}

template <int Bytes>
inline int select(const std::uint8_t* block, std::uint32_t threshold, std::uint32_t* masks, Uint<Bytes>* kept) {
  constexpr int kBlockElements = BlockLayout<Bytes>::kBlockElements;
  alignas(64) Uint<Bytes> lanes[kBlockElements];
  alignas(64) std::uint8_t flags[kBlockElements];
  to_lanes<Bytes>(block, lanes);
  const auto limit = static_cast<Uint<Bytes>>(threshold);
  for (int i = 0; i < kBlockElements; ++i) flags[i] = is_kept<Bytes>(lanes[i], limit);
  flags_to_masks<Bytes>(flags, masks);
  int n = 0;
  if (kept_count<Bytes>(masks) < kSparseLimit<Bytes>) {
    for_each_kept<Bytes>(masks, [&](int i) { kept[n++] = lanes[i]; });
  } else {
    for (int i = 0; i < kBlockElements; ++i) {
      kept[n] = lanes[i];
      n += flags[i];
    }
  }
  return n;
}

template <int Bytes>
inline void expand(const Uint<Bytes>* values, const std::uint32_t* masks, std::uint8_t* block) {
  constexpr int kBlockElements = BlockLayout<Bytes>::kBlockElements;
  alignas(64) Uint<Bytes> lanes[kBlockElements];
  if (kept_count<Bytes>(masks) < kSparseLimit<Bytes>) {
    std::memset(lanes, 0, sizeof lanes);
    for_each_kept<Bytes>(masks, [&](int i) { lanes[i] = *values++; });
  } else {
    for (int i = 0; i < kBlockElements; ++i) {
      const unsigned bit = masks[i / 32] >> i % 32 & 1;
      lanes[i] = static_cast<Uint<Bytes>>(*values & -bit);
      values += bit;
    }
  }
  from_lanes<Bytes>(lanes, block);
}

}  // namespace bitsparse::cpu::BITSPARSE_ISA
