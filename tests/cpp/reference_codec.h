// The format once more, bit by bit and straight from docs/format.md, sharing neither code nor tables with the library:
// slow, and simple enough to check by reading. Only the packed header's struct and the enums come from format.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "bitsparse/format.h"

namespace reference {

using bitsparse::Codec;
using bitsparse::DType;
using bitsparse::Keep;
using Bytes = std::vector<std::uint8_t>;

struct Rules {
  int bits, exponent_bits, mantissa_bits;
  int width_bits, reference_bits;  // header fields
  bool has_infinity;

  int lane_elements() const { return bits == 8 ? 64 : 32; }
  std::size_t block_elements() const { return 32 * static_cast<std::size_t>(lane_elements()); }
};

constexpr int kBlocksPerTile = 4;

inline Rules rules_of(DType dtype) {
  switch (dtype) {
    case DType::bfloat16: return {16, 8, 7, 4, 13, true};
    case DType::float16: return {16, 5, 10, 4, 13, true};
    case DType::float32: return {32, 8, 23, 5, 12, true};
    case DType::float8_e4m3fn: return {8, 4, 3, 4, 13, false};
    case DType::float8_e5m2: return {8, 5, 2, 4, 13, true};
  }
  throw std::logic_error("dtype");
}

inline std::uint32_t element(const Bytes& data, int bits, std::size_t i) {
  std::uint32_t x = 0;
  for (int b = 0; b < bits / 8; ++b) x |= std::uint32_t{data[i * (bits / 8) + b]} << (8 * b);
  return x;
}

inline bool is_kept(std::uint32_t x, const Rules& r, Keep keep) {
  if (keep == Keep::nonzero) return x != 0;
  const bool negative = x >> (r.bits - 1);
  const std::uint32_t magnitude = x & ((std::uint64_t{1} << (r.bits - 1)) - 1);
  const std::uint32_t exponent = magnitude >> r.mantissa_bits;
  const std::uint32_t mantissa = magnitude & ((1u << r.mantissa_bits) - 1);
  const std::uint32_t top = (1u << r.exponent_bits) - 1;
  const bool nan =
      r.has_infinity ? exponent == top && mantissa != 0 : exponent == top && mantissa == (1u << r.mantissa_bits) - 1;
  return nan || (!negative && magnitude != 0);
}

inline std::uint32_t rotate_left(std::uint32_t x, int bits) {
  return static_cast<std::uint32_t>((std::uint64_t{x} << 1 | x >> (bits - 1)) & ((std::uint64_t{1} << bits) - 1));
}
inline std::uint32_t rotate_right(std::uint32_t x, int bits) { return x >> 1 | (x & 1) << (bits - 1); }

inline int bit_length(std::uint32_t x) {
  int n = 0;
  for (; x; x >>= 1) ++n;
  return n;
}

// Where the e-th element of a lane is in its block, and which bit of the lane's mask words stands for it.
inline int position(int lane, int e, int bits) {
  const int per_chunk = 128 / bits;
  const int chunk = lane + 32 * (e / per_chunk);
  return chunk * per_chunk + e % per_chunk;
}
inline int mask_bit(int e, int bits) {
  if (bits != 16) return e;
  return e % 2 == 0 ? e / 2 : 16 + e / 2;
}

class BitWriter {
 public:
  void put(std::uint32_t value, int bits) {
    for (int i = 0; i < bits; ++i) {
      if (used_ % 8 == 0) bytes_.push_back(0);
      if (value >> i & 1) bytes_.back() |= static_cast<std::uint8_t>(1u << (used_ % 8));
      ++used_;
    }
  }
  void align(int bits) {
    while (used_ % bits != 0) put(0, 1);
  }
  const Bytes& bytes() const { return bytes_; }

 private:
  Bytes bytes_;
  std::size_t used_ = 0;
};

struct Block {
  int kind = 3, width = 0, kept = 0;
  std::uint32_t stored_reference = 0;
  Bytes body;
};

inline Block encode_block(const std::vector<std::uint32_t>& elements, const Rules& r, Codec codec, Keep keep) {
  const bool full = elements.size() == r.block_elements();
  const bool rotate = codec == Codec::tight && keep == Keep::nonzero;
  const int min_width = r.bits / 2;
  std::vector<std::uint32_t> kept, all;
  const int lane_words = r.lane_elements() / 32;
  std::vector<std::uint32_t> words(32 * static_cast<std::size_t>(lane_words), 0);  // a lane's words side by side
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < r.lane_elements(); ++e) {
      const std::size_t i = static_cast<std::size_t>(position(lane, e, r.bits));
      if (i >= elements.size() || !is_kept(elements[i], r, keep)) {
        all.push_back(0);
        continue;
      }
      const std::uint32_t p = rotate ? rotate_left(elements[i], r.bits) : elements[i];
      kept.push_back(p);
      all.push_back(p);
      const int bit = mask_bit(e, r.bits);
      words[static_cast<std::size_t>(lane * lane_words + bit / 32)] |= 1u << bit % 32;
    }
  }
  Block block;
  block.kept = static_cast<int>(kept.size());
  block.width = min_width;
  if (kept.empty()) return block;

  std::uint32_t low = kept[0], high = kept[0];
  for (std::uint32_t p : kept) {
    if (p < low) low = p;
    if (p > high) high = p;
  }
  const int drop = r.bits > r.reference_bits ? r.bits - r.reference_bits : 0;
  std::uint32_t reference = 0;
  int dense_width = r.bits;
  block.width = r.bits;
  if (codec == Codec::signless) {
    block.width = dense_width = high >> (r.bits - 1) ? r.bits : r.bits - 1;
  } else if (codec == Codec::tight) {
    block.stored_reference = low >> drop;
    reference = block.stored_reference << drop;
    block.width = std::max(min_width, bit_length(high - reference));
    dense_width = std::max(min_width, bit_length(high));
  }

  BitWriter presence, nibbles;
  for (std::uint32_t word : words) {
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t nibble = word >> (4 * i) & 15;
      presence.put(nibble != 0, 1);
      if (nibble != 0) nibbles.put(nibble, 4);
    }
  }
  nibbles.align(32);
  BitWriter body;
  block.kind = codec != Codec::raw && presence.bytes().size() + nibbles.bytes().size() < 4 * words.size() ? 1 : 0;
  if (block.kind == 1) {
    for (std::uint8_t byte : presence.bytes()) body.put(byte, 8);
    for (std::uint8_t byte : nibbles.bytes()) body.put(byte, 8);
  } else {
    for (int w = 0; w < lane_words; ++w) {
      for (int lane = 0; lane < 32; ++lane) body.put(words[static_cast<std::size_t>(lane * lane_words + w)], 32);
    }
  }
  for (std::uint32_t p : kept) body.put(p - reference, block.width);
  body.align(32);
  if (full && body.bytes().size() >= r.block_elements() * static_cast<std::size_t>(dense_width) / 8) {
    block.kind = 2;
    block.width = dense_width;
    block.stored_reference = 0;
    BitWriter dense;
    for (std::uint32_t p : all) dense.put(p, dense_width);
    block.body = dense.bytes();
  } else {
    block.body = body.bytes();
  }
  return block;
}

// How often each mask kind occurs, by its number.
struct Kinds {
  std::int64_t flat = 0, two_level = 0, dense = 0, empty = 0;
};

inline Bytes pack(const Bytes& data, DType dtype, Codec codec, Keep keep, Kinds* kinds = nullptr) {
  const Rules r = rules_of(dtype);
  const std::size_t n = data.size() / static_cast<std::size_t>(r.bits / 8);
  BitWriter table, payload;
  std::uint64_t tiles = 0, total = 0;
  for (std::size_t begin = 0; begin < n; begin += kBlocksPerTile * r.block_elements(), ++tiles) {
    BitWriter headers, bodies;
    int kept = 0;
    for (int b = 0; b < kBlocksPerTile; ++b) {
      std::vector<std::uint32_t> elements;
      const std::size_t first = begin + r.block_elements() * static_cast<std::size_t>(b);
      for (std::size_t i = first; i < n && i < first + r.block_elements(); ++i)
        elements.push_back(element(data, r.bits, i));
      const Block block = encode_block(elements, r, codec, keep);
      headers.put(static_cast<std::uint32_t>(kBlocksPerTile + bodies.bytes().size() / 4), 13);
      headers.put(static_cast<std::uint32_t>(block.width - 1), r.width_bits);
      headers.put(static_cast<std::uint32_t>(block.kind), 2);
      headers.put(block.stored_reference, r.reference_bits);
      for (std::uint8_t byte : block.body) bodies.put(byte, 8);
      kept += block.kept;
      if (kinds != nullptr) {
        ++(block.kind == 0   ? kinds->flat
           : block.kind == 1 ? kinds->two_level
           : block.kind == 2 ? kinds->dense
                             : kinds->empty);
      }
    }
    const std::uint64_t offset = payload.bytes().size() / 16;
    for (std::uint8_t byte : headers.bytes()) payload.put(byte, 8);
    for (std::uint8_t byte : bodies.bytes()) payload.put(byte, 8);
    payload.align(128);
    const std::uint64_t size = payload.bytes().size() / 16 - offset;
    const std::uint64_t entry = offset | size << 36 | static_cast<std::uint64_t>(kept) << 48;
    table.put(static_cast<std::uint32_t>(entry), 32);
    table.put(static_cast<std::uint32_t>(entry >> 32), 32);
    total += static_cast<std::uint64_t>(kept);
  }
  table.align(128);

  BitWriter out;
  const auto put64 = [&](std::uint64_t x) {
    out.put(static_cast<std::uint32_t>(x), 32);
    out.put(static_cast<std::uint32_t>(x >> 32), 32);
  };
  for (char c : std::string("BSPT")) out.put(static_cast<std::uint8_t>(c), 8);
  out.put(3, 16);
  out.put(static_cast<std::uint32_t>(dtype), 8);
  out.put(static_cast<std::uint32_t>(codec), 8);
  out.put(static_cast<std::uint32_t>(keep), 8);
  out.put(0, 8);
  out.put(kBlocksPerTile, 16);
  out.put(static_cast<std::uint32_t>(r.block_elements()), 32);
  for (std::uint64_t x : {static_cast<std::uint64_t>(n), tiles, static_cast<std::uint64_t>(payload.bytes().size()),
                          total, std::uint64_t{0}, std::uint64_t{0}}) {
    put64(x);
  }
  for (std::uint8_t byte : table.bytes()) out.put(byte, 8);
  for (std::uint8_t byte : payload.bytes()) out.put(byte, 8);
  return out.bytes();
}

// Throws std::out_of_range where the packed bytes end too early.
inline Bytes unpack(const Bytes& packed) {
  const auto bits_at = [&](std::size_t first_bit, int count) {
    std::uint64_t x = 0;
    for (int i = 0; i < count; ++i) {
      const std::size_t bit = first_bit + static_cast<std::size_t>(i);
      x |= static_cast<std::uint64_t>(packed.at(bit / 8) >> (bit % 8) & 1) << i;
    }
    return x;
  };
  const auto dtype = static_cast<DType>(packed.at(6));
  const bool rotate = packed.at(7) == 2 && packed.at(8) == 1;
  const Rules r = rules_of(dtype);
  const std::size_t n = bits_at(16 * 8, 64), tiles = bits_at(24 * 8, 64);
  const std::size_t payload = (64 + 8 * tiles + 15) / 16 * 16;
  Bytes out(n * static_cast<std::size_t>(r.bits / 8), 0);
  for (std::size_t tile = 0; tile < tiles; ++tile) {
    const std::size_t blob = payload + 16 * bits_at((64 + 8 * tile) * 8, 36);
    for (int b = 0; b < kBlocksPerTile; ++b) {
      const std::size_t header = (blob + 4 * static_cast<std::size_t>(b)) * 8;
      std::size_t at = (blob + 4 * bits_at(header, 13)) * 8;
      const int width = static_cast<int>(bits_at(header + 13, r.width_bits)) + 1;
      const auto kind = bits_at(header + 13 + static_cast<std::size_t>(r.width_bits), 2);
      const int drop = r.bits > r.reference_bits ? r.bits - r.reference_bits : 0;
      const auto reference = static_cast<std::uint32_t>(
          bits_at(header + 15 + static_cast<std::size_t>(r.width_bits), r.reference_bits) << drop);
      const std::size_t lane_words = static_cast<std::size_t>(r.lane_elements()) / 32;
      std::vector<std::uint32_t> words(32 * lane_words, kind == 2 ? 0xffffffffu : 0u);
      if (kind == 0) {
        for (std::size_t i = 0; i < words.size(); ++i, at += 32) {
          words[i % 32 * lane_words + i / 32] = static_cast<std::uint32_t>(bits_at(at, 32));
        }
      } else if (kind == 1) {
        const std::size_t presence = at;
        std::size_t nibble = at + 8 * words.size();
        for (std::size_t i = 0; i < 8 * words.size(); ++i) {
          if (!bits_at(presence + i, 1)) continue;
          words[i / 8] |= static_cast<std::uint32_t>(bits_at(nibble, 4)) << (4 * (i % 8));
          nibble += 4;
        }
        at = presence + (nibble - presence + 31) / 32 * 32;
      }
      for (int lane = 0; lane < 32; ++lane) {
        for (int e = 0; e < r.lane_elements(); ++e) {
          const int mask = mask_bit(e, r.bits);
          if (!(words[static_cast<std::size_t>(lane) * lane_words + static_cast<std::size_t>(mask / 32)] >> mask % 32 &
                1))
            continue;
          auto value = static_cast<std::uint32_t>(bits_at(at, width)) + reference;
          if (r.bits < 32) value &= (1u << r.bits) - 1;
          at += static_cast<std::size_t>(width);
          if (rotate) value = rotate_right(value, r.bits);
          const std::size_t i = (tile * kBlocksPerTile + static_cast<std::size_t>(b)) * r.block_elements() +
                                static_cast<std::size_t>(position(lane, e, r.bits));
          for (int k = 0; k < r.bits / 8; ++k) {
            const std::size_t to = i * static_cast<std::size_t>(r.bits / 8) + static_cast<std::size_t>(k);
            if (to < out.size()) out[to] = static_cast<std::uint8_t>(value >> (8 * k));
          }
        }
      }
    }
  }
  return out;
}

// What a tensor restores as: kept elements as they are, all others +0.
inline Bytes restored(const Bytes& data, DType dtype, Keep keep) {
  const Rules r = rules_of(dtype);
  Bytes out = data;
  const auto size = static_cast<std::size_t>(r.bits / 8);
  for (std::size_t i = 0; i < data.size() / size; ++i) {
    if (!is_kept(element(data, r.bits, i), r, keep)) std::memset(out.data() + i * size, 0, size);
  }
  return out;
}

}  // namespace reference
