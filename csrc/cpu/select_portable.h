// Element selection in plain loops that compilers vectorise where they can.
#pragma once

#include "cpu/simd_common.h"

namespace bitsparse::cpu::BITSPARSE_ISA {

// Eight flags (bytes 0 or 1) to eight bits.
inline std::uint8_t flag_bits(const std::uint8_t* flags) {
  return static_cast<std::uint8_t>(load<std::uint64_t>(flags) * 0x0102040810204080u >> 56);
}

// With fewer kept elements than this, visiting the set bits is faster than looking at all elements.
constexpr int kSparseLimit = 400;

inline int kept_count(const std::uint32_t* masks) {
  int count = 0;
  for (int lane = 0; lane < kLanes; ++lane) count += popcount(masks[lane]);
  return count;
}

inline void flags_to_masks(const std::uint8_t* flags, std::uint32_t* masks) {
  for (int lane = 0; lane < kLanes; ++lane) {
    std::uint32_t mask = 0;
    for (int byte = 0; byte < 4; ++byte) {
      mask |= static_cast<std::uint32_t>(flag_bits(flags + lane * kLaneElements + 8 * byte)) << (8 * byte);
    }
    masks[lane] = mask;
  }
}

template <int Bytes>
inline bool is_kept(Uint<Bytes> x, Uint<Bytes> threshold) {
  return (static_cast<Int<Bytes>>(x) > 0) | (x > threshold);
}

template <int Bytes>
inline Range scan(const std::uint8_t* block, std::uint32_t threshold, bool rotate, std::uint32_t* masks) {
  alignas(64) Uint<Bytes> lanes[kBlockElements];
  alignas(64) std::uint8_t flags[kBlockElements];
  to_lanes<Bytes>(block, lanes);
  const auto limit = static_cast<Uint<Bytes>>(threshold);
  for (int i = 0; i < kBlockElements; ++i) flags[i] = is_kept<Bytes>(lanes[i], limit);
  flags_to_masks(flags, masks);
  if (rotate) rotate_left<Bytes>(lanes, kBlockElements);
  auto low = static_cast<Uint<Bytes>>(-1);
  Uint<Bytes> high = 0;
  for (int i = 0; i < kBlockElements; ++i) {
    const auto dropped = static_cast<Uint<Bytes>>(flags[i] - 1);  // all bits set or none
    const auto for_low = static_cast<Uint<Bytes>>(lanes[i] | dropped);
    const auto for_high = static_cast<Uint<Bytes>>(lanes[i] & ~dropped);
    low = for_low < low ? for_low : low;
    high = for_high > high ? for_high : high;
  }
  return {low, high};
}

template <int Bytes>
inline int select(const std::uint8_t* block, std::uint32_t threshold, std::uint32_t* masks, Uint<Bytes>* kept) {
  alignas(64) Uint<Bytes> lanes[kBlockElements];
  alignas(64) std::uint8_t flags[kBlockElements];
  to_lanes<Bytes>(block, lanes);
  const auto limit = static_cast<Uint<Bytes>>(threshold);
  for (int i = 0; i < kBlockElements; ++i) flags[i] = is_kept<Bytes>(lanes[i], limit);
  flags_to_masks(flags, masks);
  const int total = kept_count(masks);
  int n = 0;
  if (total < kSparseLimit) {
    for (int lane = 0; lane < kLanes; lane += 2) {
      std::uint64_t mask = masks[lane] | static_cast<std::uint64_t>(masks[lane + 1]) << 32;
      for (; mask; mask &= mask - 1) kept[n++] = lanes[lane * kLaneElements + __builtin_ctzll(mask)];
    }
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
  alignas(64) Uint<Bytes> lanes[kBlockElements];
  if (kept_count(masks) < kSparseLimit) {
    std::memset(lanes, 0, sizeof lanes);
    for (int lane = 0; lane < kLanes; lane += 2) {
      std::uint64_t mask = masks[lane] | static_cast<std::uint64_t>(masks[lane + 1]) << 32;
      for (; mask; mask &= mask - 1) lanes[lane * kLaneElements + __builtin_ctzll(mask)] = *values++;
    }
  } else {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int e = 0; e < kLaneElements; ++e) {
        const unsigned bit = masks[lane] >> e & 1;
        lanes[lane * kLaneElements + e] = static_cast<Uint<Bytes>>(*values & -bit);
        values += bit;
      }
    }
  }
  from_lanes<Bytes>(lanes, block);
}

}  // namespace bitsparse::cpu::BITSPARSE_ISA
