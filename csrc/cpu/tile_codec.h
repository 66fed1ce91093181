// Encodes and decodes one tile at a time: the part of the CPU backend that knows the format and no torch.
//
// The same code is compiled once per instruction set (tile_*.cpp) and picked at run time, so that one library is fast
// on new machines and runs on old ones. All variants give the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bitsparse/format.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the format is little endian and is read and written as it lies in memory"
#endif

namespace bitsparse::cpu {

// What the encoder has to know besides the element size.
struct EncodeRules {
  Codec codec;
  bool rotate;              // rotates_sign(codec, keep)
  std::uint32_t threshold;  // an element is kept when it is > 0 as a signed integer or > threshold as an unsigned one
};

struct DecodeRules {
  bool rotate;            // rotates_sign(codec, keep)
  bool may_be_two_level;  // bitsparse::may_be_two_level(codec)
};

EncodeRules encode_rules(DType dtype, Codec codec, Keep keep);

// Why a tile was refused; `what` is null when it was not.
struct TileError {
  const char* what = nullptr;
  int block = 0;
  std::int64_t expected = 0;
  std::int64_t got = 0;
};

// Bytes that an encoder may write past the end of the largest blob, and a decoder read past the end of one.
constexpr std::size_t kBlobSlack = 128;

struct TileCodec {
  // Encodes `elements` (1 .. a full tile) elements; returns the blob's size in units and the number of kept elements.
  // `blob` is 4-byte aligned and has room for the largest blob and kBlobSlack.
  std::uint32_t (*encode)(const std::uint8_t* in, std::uint32_t elements, const EncodeRules& rules, std::uint8_t* blob,
                          std::uint32_t* kept);
  // Decodes a blob of `units` units. Trusts nothing in it: reads at most kBlobSlack bytes past its end and writes
  // exactly `elements` elements. With a null `out` it only checks.
  TileError (*decode)(const std::uint8_t* blob, std::uint32_t units, std::uint32_t kept, std::uint32_t elements,
                      const DecodeRules& rules, std::uint8_t* out);
};

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };
constexpr int kIsaCount = 3;

bool isa_available(Isa isa);  // compiled in, and this processor has it
Isa current_isa();            // the best one available, unless forced
void force_isa(Isa isa);      // for tests and benchmarks; ignored if not available

const TileCodec& tile_codec(int element_bytes, Isa isa);

// One table per element size 1, 2, 4; null where the compiler can't target the instruction set.
struct TileCodecs {
  TileCodec bytes1, bytes2, bytes4;
};
const TileCodecs* portable_tile_codecs();
const TileCodecs* avx2_tile_codecs();
const TileCodecs* avx512_tile_codecs();

}  // namespace bitsparse::cpu
