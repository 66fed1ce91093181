// The mask of a block: element masks (bit e = the lane's e-th element) <-> stored words, flat or two-level.
#pragma once

#include "cpu/select.h"

namespace bitsparse::cpu::BITSPARSE_ISA {

// Two-byte elements come in pairs: even elements have the low half of the stored word, odd ones the high half.
template <int Bytes>
inline void to_stored_order(const std::uint32_t* masks, std::uint32_t* words) {
  for (int lane = 0; lane < kLanes; ++lane) {
    std::uint32_t x = masks[lane];
    if constexpr (Bytes == 2) {
      std::uint32_t t;
      t = (x ^ x >> 1) & 0x22222222, x ^= t ^ t << 1;
      t = (x ^ x >> 2) & 0x0c0c0c0c, x ^= t ^ t << 2;
      t = (x ^ x >> 4) & 0x00f000f0, x ^= t ^ t << 4;
      t = (x ^ x >> 8) & 0x0000ff00, x ^= t ^ t << 8;
    }
    words[lane] = x;
  }
}
template <int Bytes>
inline void from_stored_order(const std::uint32_t* words, std::uint32_t* masks) {
  for (int lane = 0; lane < kLanes; ++lane) {
    std::uint32_t x = words[lane];
    if constexpr (Bytes == 2) {
      std::uint32_t t;
      t = (x ^ x >> 8) & 0x0000ff00, x ^= t ^ t << 8;
      t = (x ^ x >> 4) & 0x00f000f0, x ^= t ^ t << 4;
      t = (x ^ x >> 2) & 0x0c0c0c0c, x ^= t ^ t << 2;
      t = (x ^ x >> 1) & 0x22222222, x ^= t ^ t << 1;
    }
    masks[lane] = x;
  }
}

// Byte b of lane l at 32 b + l.
inline void mask_bytes(const std::uint32_t* words, std::uint8_t* bytes) {
  for (int b = 0; b < 4; ++b) {
    for (int lane = 0; lane < kLanes; ++lane) {
      bytes[kLanes * b + lane] = static_cast<std::uint8_t>(words[lane] >> (8 * b));
    }
  }
}

// Words that the two-level form of a mask takes.
inline int two_level_size(const std::uint32_t* words) {
  int present = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    std::uint32_t x = words[lane];  // to bit 0 of each byte: whether it is non-zero
    x |= x >> 4 & 0x0f0f0f0f;
    x |= x >> 2 & 0x03030303;
    x |= x >> 1 & 0x01010101;
    present += static_cast<int>((x & 0x01010101) * 0x01010101 >> 24);
  }
  return kPresenceWords + (present + 3) / 4;
}

// Returns the mask's words. `out` has kBlobSlack bytes more than that.
inline int write_mask(const std::uint32_t* words, MaskKind kind, std::uint8_t* out) {
  if (kind == MaskKind::flat) {
    std::memcpy(out, words, 4 * kFlatMaskWords);
    return kFlatMaskWords;
  }
  alignas(64) std::uint8_t bytes[4 * kLanes];
  mask_bytes(words, bytes);
  for (int b = 0; b < kPresenceWords; ++b) {
    std::uint32_t present = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      present |= static_cast<std::uint32_t>(bytes[kLanes * b + lane] != 0) << lane;
    }
    store(out + 4 * b, present);
  }
  out += 4 * kPresenceWords;
  const int present = compact_bytes(bytes, out);
  store(out + present, std::uint32_t{0});
  return kPresenceWords + (present + 3) / 4;
}

// The same from the presence words of a stored one.
inline int stored_two_level_size(const std::uint8_t* in) {
  int present = 0;
  for (int b = 0; b < kPresenceWords; ++b) present += popcount(load<std::uint32_t>(in + 4 * b));
  return kPresenceWords + (present + 3) / 4;
}

inline void read_two_level(const std::uint8_t* in, std::uint32_t* words) {
  alignas(64) std::uint8_t bytes[4 * kLanes];
  const std::uint8_t* next = in + 4 * kPresenceWords;
  for (int b = 0; b < kPresenceWords; ++b) {
    next += expand_bytes(next, load<std::uint32_t>(in + 4 * b), bytes + kLanes * b);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    words[lane] = bytes[lane] | bytes[kLanes + lane] << 8 | bytes[2 * kLanes + lane] << 16 |
                  static_cast<std::uint32_t>(bytes[3 * kLanes + lane]) << 24;
  }
}

}  // namespace bitsparse::cpu::BITSPARSE_ISA
