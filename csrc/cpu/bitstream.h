// Codes of one width <-> bytes. Eight codes of `width` bits are exactly `width` bytes, so groups of eight are
// independent.
#pragma once

#include "cpu/simd_common.h"

namespace bitsparse::cpu::BITSPARSE_ISA {

constexpr int kGroup = 8;

// Writes `width` bytes and up to 16 more. Element bits above `width` are ignored.
template <int Bytes>
inline void pack_group(const Uint<Bytes>* codes, int width, std::uint8_t* out) {
  constexpr int kPerWord = 8 / Bytes;
  const auto word = [&](int i) { return squeeze<Bytes>(load<std::uint64_t>(codes + i * kPerWord), width); };
  if constexpr (Bytes == 1) {
    store(out, word(0));
  } else if constexpr (Bytes == 2) {
    const int half = 4 * width;  // 32..60
    const std::uint64_t high = word(1);
    store(out, word(0) | high << half);
    store(out + 8, high >> (64 - half));
  } else {
    const int quarter = 2 * width;  // 32..62
    const uint128 low = word(0) | static_cast<uint128>(word(1)) << quarter;
    const uint128 high = word(2) | static_cast<uint128>(word(3)) << quarter;
    const int start = width >> 1;  // the high half starts in this byte, in its middle if the width is odd
    store(out, low);
    store(out + start, high << (4 * (width & 1)) | low >> (8 * start));
  }
}

// Reads up to 40 bytes.
template <int Bytes>
inline void unpack_group(const std::uint8_t* in, int width, Uint<Bytes>* codes) {
  if constexpr (Bytes == 1) {
    store(codes, spread<1>(load<std::uint64_t>(in), width));
  } else if constexpr (Bytes == 2) {
    const int half = 4 * width;
    const std::uint64_t low = load<std::uint64_t>(in);
    store(codes, spread<2>(low, width));
    store(codes + 4, spread<2>(low >> half | load<std::uint64_t>(in + 8) << (64 - half), width));
  } else {
    for (int i = 0; i < 4; ++i) {
      const int bit = 2 * width * i;
      const uint128 word = load<uint128>(in + (bit >> 3)) >> (bit & 7);
      store(codes + 2 * i, spread<4>(static_cast<std::uint64_t>(word), width));
    }
  }
}

// Packs `count` codes, then zeros to the end of the last 32-bit word. May write kGroup zero codes after the last one,
// and past the end of `out` by less than 64 bytes, the first kUnitBytes of them zero.
template <int Bytes>
inline void pack_codes(Uint<Bytes>* codes, int count, int width, std::uint8_t* out) {
  const std::size_t full_bytes = static_cast<std::size_t>(count) * Bytes;
  if (width == 8 * Bytes) {
    std::memcpy(out, codes, full_bytes);
    out += full_bytes;
  } else {
    std::memset(codes + count, 0, kGroup * Bytes);
    for (int i = 0; i < count; i += kGroup, out += width) pack_group<Bytes>(codes + i, width, out);
  }
  std::memset(out, 0, kUnitBytes);
}

// Unpacks `count` codes; writes up to kGroup - 1 more, reads past the end of the codes by less than 80 bytes.
template <int Bytes>
inline void unpack_codes(const std::uint8_t* in, int count, int width, Uint<Bytes>* codes) {
  if (width == 8 * Bytes) {
    std::memcpy(codes, in, static_cast<std::size_t>(count) * Bytes);
  } else {
    for (int i = 0; i < count; i += kGroup, in += width) unpack_group<Bytes>(in, width, codes + i);
  }
}

}  // namespace bitsparse::cpu::BITSPARSE_ISA
