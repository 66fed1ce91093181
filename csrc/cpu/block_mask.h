// The mask of a block: element masks <-> stored words, flat or two-level. In memory both are in lane-major order, the
// words of a lane side by side.
#pragma once

#include "cpu/select.h"

namespace bitsparse::cpu::BITSPARSE_ISA {

// Two-byte elements come in pairs: even elements have the low half of the stored word, odd ones the high half.
template <int Bytes>
inline void to_stored_order(const std::uint32_t* masks, std::uint32_t* words) {
  for (int i = 0; i < BlockLayout<Bytes>::kFlatMaskWords; ++i) {
    std::uint32_t x = masks[i];
    if constexpr (Bytes == 2) {
      std::uint32_t t;
      t = (x ^ x >> 1) & 0x22222222, x ^= t ^ t << 1;
      t = (x ^ x >> 2) & 0x0c0c0c0c, x ^= t ^ t << 2;
      t = (x ^ x >> 4) & 0x00f000f0, x ^= t ^ t << 4;
      t = (x ^ x >> 8) & 0x0000ff00, x ^= t ^ t << 8;
    }
    words[i] = x;
  }
}
template <int Bytes>
inline void from_stored_order(const std::uint32_t* words, std::uint32_t* masks) {
  for (int i = 0; i < BlockLayout<Bytes>::kFlatMaskWords; ++i) {
    std::uint32_t x = words[i];
    if constexpr (Bytes == 2) {
      std::uint32_t t;
      t = (x ^ x >> 8) & 0x0000ff00, x ^= t ^ t << 8;
      t = (x ^ x >> 4) & 0x00f000f0, x ^= t ^ t << 4;
      t = (x ^ x >> 2) & 0x0c0c0c0c, x ^= t ^ t << 2;
      t = (x ^ x >> 1) & 0x22222222, x ^= t ^ t << 1;
    }
    masks[i] = x;
  }
}

// The lowest bit of every nibble that is not zero.
inline std::uint32_t nonzero_nibbles(std::uint32_t x) {
  x |= x >> 1;
  return (x | x >> 2) & 0x11111111;
}

// The nibbles of `x` at those bits, side by side, and back.
inline std::uint32_t collect_nibbles(std::uint32_t x, std::uint32_t nonzero) {
#if defined(BITSPARSE_BMI2)
  return _pext_u32(x, nonzero * 15);
#else
  std::uint32_t nibbles = 0;
  for (int at = 0; nonzero; nonzero &= nonzero - 1, at += 4) nibbles |= (x >> __builtin_ctz(nonzero) & 15) << at;
  return nibbles;
#endif
}
inline std::uint32_t spread_nibbles(std::uint32_t nibbles, std::uint32_t nonzero) {
#if defined(BITSPARSE_BMI2)
  return _pdep_u32(nibbles, nonzero * 15);
#else
  std::uint32_t x = 0;
  for (; nonzero; nonzero &= nonzero - 1, nibbles >>= 4) x |= (nibbles & 15) << __builtin_ctz(nonzero);
  return x;
#endif
}

// Bits 0, 4, ..., 28 to bits 0 to 7, and back.
inline std::uint32_t presence_of(std::uint32_t nonzero) {
  nonzero = (nonzero | nonzero >> 3) & 0x03030303;
  nonzero = (nonzero | nonzero >> 6) & 0x000f000f;
  return (nonzero | nonzero >> 12) & 0xff;
}
inline std::uint32_t nibbles_of(std::uint32_t presence) {
  presence = (presence | presence << 12) & 0x000f000f;
  presence = (presence | presence << 6) & 0x03030303;
  return (presence | presence << 3) & 0x11111111;
}

// Words that the two-level form of a mask takes.
template <int Bytes>
inline int two_level_size(const std::uint32_t* words) {
  using L = BlockLayout<Bytes>;
  std::uint32_t nibbles = 0;
  for (int i = 0; i < L::kFlatMaskWords; ++i)
    nibbles += static_cast<std::uint32_t>(popcount(nonzero_nibbles(words[i])));
  return static_cast<int>(L::two_level_words(nibbles));
}

// The flat form: the first words of all lanes, then the second ones.
template <int Bytes>
inline void write_flat(const std::uint32_t* words, std::uint8_t* out) {
  constexpr int kWords = BlockLayout<Bytes>::kLaneMaskWords;
  for (int i = 0; i < kLanes * kWords; ++i) store(out + 4 * (i % kWords * kLanes + i / kWords), words[i]);
}
template <int Bytes>
inline void read_flat(const std::uint8_t* in, std::uint32_t* words) {
  constexpr int kWords = BlockLayout<Bytes>::kLaneMaskWords;
  for (int i = 0; i < kLanes * kWords; ++i) words[i] = load<std::uint32_t>(in + 4 * (i % kWords * kLanes + i / kWords));
}

// Returns the mask's words. `out` has kBlobSlack bytes more than that.
template <int Bytes>
inline int write_mask(const std::uint32_t* words, MaskKind kind, std::uint8_t* out) {
  using L = BlockLayout<Bytes>;
  if (kind == MaskKind::flat) {
    write_flat<Bytes>(words, out);
    return L::kFlatMaskWords;
  }
  std::uint8_t* next = out + 4 * L::kPresenceWords;
  std::uint64_t pending = 0;
  int filled = 0;  // bits of it, less than 32 between words
  for (int i = 0; i < L::kFlatMaskWords; ++i) {
    const std::uint32_t nonzero = nonzero_nibbles(words[i]);
    out[i] = static_cast<std::uint8_t>(presence_of(nonzero));
    pending |= static_cast<std::uint64_t>(collect_nibbles(words[i], nonzero)) << filled;
    filled += 4 * popcount(nonzero);
    store(next, static_cast<std::uint32_t>(pending));
    if (filled >= 32) {
      next += 4;
      pending >>= 32;
      filled -= 32;
    }
  }
  store(next, static_cast<std::uint32_t>(pending));
  return static_cast<int>(next - out + (filled ? 4 : 0)) / 4;
}

// The same from the presence bytes of a stored one.
template <int Bytes>
inline int stored_two_level_size(const std::uint8_t* in) {
  using L = BlockLayout<Bytes>;
  std::uint32_t nibbles = 0;
  for (int w = 0; w < L::kPresenceWords; ++w) {
    nibbles += static_cast<std::uint32_t>(popcount(load<std::uint32_t>(in + 4 * w)));
  }
  return static_cast<int>(L::two_level_words(nibbles));
}

// Reads up to 8 bytes past the form.
template <int Bytes>
inline void read_two_level(const std::uint8_t* in, std::uint32_t* words) {
  using L = BlockLayout<Bytes>;
  const std::uint8_t* nibbles = in + 4 * L::kPresenceWords;
  int read = 0;
  for (int i = 0; i < L::kFlatMaskWords; ++i) {
    const std::uint32_t nonzero = nibbles_of(in[i]);
    const std::uint64_t next = load<std::uint64_t>(nibbles + read / 2) >> (4 * (read & 1));
    words[i] = spread_nibbles(static_cast<std::uint32_t>(next), nonzero);
    read += popcount(nonzero);
  }
}

}  // namespace bitsparse::cpu::BITSPARSE_ISA
