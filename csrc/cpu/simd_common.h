// Small integer helpers of the tile codec, in the namespace of the instruction set being compiled (BITSPARSE_ISA): the
// copies of different translation units must not be merged by the linker. For the same reason nothing here, nor in the
// headers that include it, uses templates of the standard library.
#pragma once

#ifndef BITSPARSE_ISA
#error "define BITSPARSE_ISA, the namespace of the instruction set, before including this"
#endif

#include <cstdint>
#include <cstring>

#include "cpu/tile_codec.h"
#if defined(BITSPARSE_BMI2)
#include <immintrin.h>
#endif

namespace bitsparse::cpu::BITSPARSE_ISA {

template <int Bytes>
struct UintOf;
template <>
struct UintOf<1> {
  using type = std::uint8_t;
  using signed_type = std::int8_t;
};
template <>
struct UintOf<2> {
  using type = std::uint16_t;
  using signed_type = std::int16_t;
};
template <>
struct UintOf<4> {
  using type = std::uint32_t;
  using signed_type = std::int32_t;
};
template <int Bytes>
using Uint = typename UintOf<Bytes>::type;
template <int Bytes>
using Int = typename UintOf<Bytes>::signed_type;

__extension__ typedef unsigned __int128 uint128;

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class T>
inline void store(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

inline int popcount(std::uint32_t x) {
#if defined(BITSPARSE_BMI2) || !defined(__x86_64__)
  return __builtin_popcount(x);
#else  // no instruction for it: GCC would call a function
  x -= x >> 1 & 0x55555555;
  x = (x & 0x33333333) + (x >> 2 & 0x33333333);
  return static_cast<int>(((x + (x >> 4)) & 0x0f0f0f0f) * 0x01010101 >> 24);
#endif
}
inline int bit_length(std::uint32_t x) { return x ? 32 - __builtin_clz(x) : 0; }

// The low `bits` (1..63) of every `field` bits of a 64-bit word.
inline std::uint64_t low_bits(int bits, int field) {
  std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
  for (int shift = field; shift < 64; shift *= 2) mask |= mask << shift;
  return mask;
}

// Concatenates the low `width` bits of each element of a 64-bit word.
template <int Bytes>
inline std::uint64_t squeeze(std::uint64_t x, int width) {
#if defined(BITSPARSE_BMI2)
  return _pext_u64(x, low_bits(width, 8 * Bytes));
#else
  for (int field = 8 * Bytes; field < 64; field *= 2, width *= 2) {
    const std::uint64_t low = low_bits(width, 2 * field);
    x = (x & low) | ((x >> field) & low) << width;
  }
  return x;
#endif
}

// The inverse: cuts the low bits of a 64-bit word into elements of `width` bits.
template <int Bytes>
inline std::uint64_t spread(std::uint64_t x, int width) {
#if defined(BITSPARSE_BMI2)
  return _pdep_u64(x, low_bits(width, 8 * Bytes));
#else
  for (int field = 32; field >= 8 * Bytes; field /= 2) {
    const int bits = width * field / (8 * Bytes);
    const std::uint64_t low = low_bits(bits, 2 * field);
    x = (x & low) | ((x >> bits) & low) << field;
  }
  return x;
#endif
}

// Lanes read a block in an order that hardware prefetchers don't see through: with each 64 bytes that are read, 64 of
// what comes a few blocks later are asked for. Past the end of the data this is harmless.
inline void prefetch_ahead(const std::uint8_t* block, int line) {
#if defined(__GNUC__)
  constexpr int kAhead = 4096;
  __builtin_prefetch(block + kAhead + 64 * line);
#endif
}

// Block order <-> lane-major order: a transposition of 16-byte chunks.
template <int Bytes>
inline void to_lanes(const std::uint8_t* block, Uint<Bytes>* lanes) {
  using L = BlockLayout<Bytes>;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int line = 0; line < L::kChunksPerLane / 4; ++line)
      prefetch_ahead(block, lane * (L::kChunksPerLane / 4) + line);
    for (int e = 0; e < L::kLaneElements; e += L::kChunkElements) {
      std::memcpy(lanes + lane * L::kLaneElements + e, block + L::element(lane, e) * Bytes, kChunkBytes);
    }
  }
}
template <int Bytes>
inline void from_lanes(const Uint<Bytes>* lanes, std::uint8_t* block) {
  using L = BlockLayout<Bytes>;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int e = 0; e < L::kLaneElements; e += L::kChunkElements) {
      std::memcpy(block + L::element(lane, e) * Bytes, lanes + lane * L::kLaneElements + e, kChunkBytes);
    }
  }
}

// Elements that a block's mask keeps.
template <int Bytes>
inline int kept_count(const std::uint32_t* masks) {
  int count = 0;
  for (int i = 0; i < BlockLayout<Bytes>::kFlatMaskWords; ++i) count += popcount(masks[i]);
  return count;
}

// A vector's part of a mask, whose bits are those of memory.
template <class Mask>
inline void store_part(std::uint32_t* masks, int vector, Mask mask) {
  store(reinterpret_cast<std::uint8_t*>(masks) + sizeof mask * static_cast<std::size_t>(vector), mask);
}
template <class Mask>
inline Mask load_part(const std::uint32_t* masks, int vector) {
  return load<Mask>(reinterpret_cast<const std::uint8_t*>(masks) + sizeof(Mask) * static_cast<std::size_t>(vector));
}

// Sign bit to bit 0, and back.
template <int Bytes>
inline void rotate_left(Uint<Bytes>* values, int count) {
  for (int i = 0; i < count; ++i) {
    values[i] = static_cast<Uint<Bytes>>(values[i] << 1 | values[i] >> (8 * Bytes - 1));
  }
}
template <int Bytes>
inline void rotate_right(Uint<Bytes>* values, int count) {
  for (int i = 0; i < count; ++i) {
    values[i] = static_cast<Uint<Bytes>>(values[i] >> 1 | values[i] << (8 * Bytes - 1));
  }
}

}  // namespace bitsparse::cpu::BITSPARSE_ISA
