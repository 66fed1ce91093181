// Moving the kept bytes of a word together, or back to their places, with one byte permutation. Four mask bits say
// which bytes; a warp holds the permutations for all 16 nibbles, one a lane, and looks them up with a shuffle. Words of
// moved bytes then go to shared memory or come from it one word at a time.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/ptx.cuh"

namespace bitsparse::kernels {

namespace detail {
// Of a nibble: in the low half the selector of a permutation of a word and a zero, in the high half 8 times the number
// of its bits.
struct ByteMoveEntries {
  std::uint32_t entries[16];
};

// `compact`: kept bytes to the lowest places. Else the inverse: the lowest bytes to the kept places, zero elsewhere.
constexpr ByteMoveEntries byte_moves(bool compact) {
  constexpr std::uint32_t kZero = 4;
  ByteMoveEntries moves{};
  for (std::uint32_t nibble = 0; nibble < 16; ++nibble) {
    std::uint32_t selector = 0, count = 0;
    for (std::uint32_t byte = 0; byte < 4; ++byte) {
      const bool kept = nibble >> byte & 1;
      if (!compact) selector |= (kept ? count : kZero) << (4 * byte);
      if (compact && kept) selector |= byte << (4 * count);
      count += kept;
    }
    for (std::uint32_t byte = count; compact && byte < 4; ++byte) selector |= kZero << (4 * byte);
    moves.entries[nibble] = selector | 8 * count << 16;
  }
  return moves;
}
static __device__ const ByteMoveEntries compacting = byte_moves(true);
static __device__ const ByteMoveEntries expanding = byte_moves(false);
}  // namespace detail

struct ByteMove {
  std::uint32_t entry;
  __device__ __forceinline__ std::uint32_t operator()(std::uint32_t x) const { return permute_bytes(x, 0, entry); }
  __device__ __forceinline__ std::uint32_t bits() const { return entry >> 16; }
};

// A lane's part of the table. To be loaded early: the load may take as long as one of the input. Larger elements are
// moved one by one and have no table.
template <int Bytes>
struct ByteMoves {
  static __device__ __forceinline__ ByteMoves compacting(int) { return {}; }
  static __device__ __forceinline__ ByteMoves expanding(int) { return {}; }
};
template <>
struct ByteMoves<1> {
  std::uint32_t entry;
  static __device__ __forceinline__ ByteMoves compacting(int lane) {
    return {__ldg(&detail::compacting.entries[lane % 16])};
  }
  static __device__ __forceinline__ ByteMoves expanding(int lane) {
    return {__ldg(&detail::expanding.entries[lane % 16])};
  }
  // Warp-wide: what the low four bits of `mask` ask for. A shuffle looks at five; a warp has the table twice.
  __device__ __forceinline__ ByteMove of(std::uint32_t mask) const {
    return {__shfl_sync(~0u, entry, static_cast<int>(mask))};
  }
};

// Writes runs of bytes side by side from any byte of shared memory on, a word at a time.
class ByteWriter {
 public:
  __device__ __forceinline__ ByteWriter(std::uint32_t* words, std::uint32_t first_byte)
      : address_(shared_address(words) + (first_byte & ~3u)), bit_(8 * first_byte) {}

  // The low `bits` bits of `x`, whose others are zero; `bits` is a multiple of 8. A word that is whole is stored,
  // predicated, not branched around: without what comes before the first byte, which is somebody else's.
  __device__ __forceinline__ void append(std::uint32_t x, std::uint32_t bits) {
    const std::uint32_t end = bit_ + bits;
    const std::uint64_t moved = static_cast<std::uint64_t>(x) * __funnelshift_l(0, 1, bit_);
    pending_ += static_cast<std::uint32_t>(moved);
    asm volatile(
        "{.reg .pred p; .reg .b32 t; xor.b32 t, %2, %3; and.b32 t, t, 32; setp.ne.u32 p, t, 0;"
        " @p st.shared.b32 [%0], %1; @p add.u32 %0, %0, 4; selp.b32 %1, %4, %1, p;}"
        : "+r"(address_), "+r"(pending_)
        : "r"(bit_), "r"(end), "r"(static_cast<std::uint32_t>(moved >> 32))
        : "memory");
    bit_ = end;
  }
  // Merges the rest into its word, once all whole words are stored. Where no word ends it has been zero before.
  __device__ __forceinline__ void finish() const {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p red.shared.or.b32 [%0], %1;}" ::"r"(address_), "r"(pending_)
                 : "memory");
  }

 private:
  std::uint32_t address_;
  std::uint32_t bit_;          // the next one, counted from a whole word
  std::uint32_t pending_ = 0;  // of the word at `address_`
};

// Reads bytes one after another from any byte of shared memory on. Up to two words beyond the last one are read.
class ByteReader {
 public:
  __device__ __forceinline__ ByteReader(const std::uint32_t* words, std::uint32_t first_byte)
      : address_(shared_address(words) + (first_byte & ~3u)), bit_(8 * first_byte) {
    words += first_byte >> 2;
    low_ = words[0];
    high_ = words[1];
  }

  // The next four, of which all but `bits` bits will be read again.
  __device__ __forceinline__ std::uint32_t peek() const { return __funnelshift_r(low_, high_, bit_); }
  __device__ __forceinline__ void skip(std::uint32_t bits) {
    const std::uint32_t end = bit_ + bits;
    asm volatile(
        "{.reg .pred p; .reg .b32 t; xor.b32 t, %3, %4; and.b32 t, t, 32; setp.ne.u32 p, t, 0; @p mov.b32 %0, %1;"
        " @p ld.shared.u32 %1, [%2+8]; @p add.u32 %2, %2, 4;}"
        : "+r"(low_), "+r"(high_), "+r"(address_)
        : "r"(bit_), "r"(end)
        : "memory");
    bit_ = end;
  }

 private:
  std::uint32_t address_;
  std::uint32_t bit_;
  std::uint32_t low_, high_;  // the words at `address_`
};

}  // namespace bitsparse::kernels
