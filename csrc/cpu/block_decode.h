// Blob -> elements. Everything that a blob says is checked before it is used.
#pragma once

#include "cpu/bitstream.h"
#include "cpu/block_mask.h"

namespace bitsparse::cpu::BITSPARSE_ISA {

// Reads the mask of a block whose body starts at `body` and may take `room` words. On success `masks` has the kept
// elements and the return value is the mask's words; otherwise the value is negative and the mask would take its
// negation.
template <int Bytes>
inline int read_mask(MaskKind kind, const std::uint8_t* body, int room, std::uint32_t* masks) {
  using L = BlockLayout<Bytes>;
  alignas(64) std::uint32_t words[L::kFlatMaskWords];
  int size = 0;
  switch (kind) {
    case MaskKind::flat:
      size = L::kFlatMaskWords;
      if (size > room) return -size;
      read_flat<Bytes>(body, words);
      break;
    case MaskKind::two_level:
      if (L::kPresenceWords > room) return -L::kPresenceWords;
      size = stored_two_level_size<Bytes>(body);
      if (size > room) return -size;
      read_two_level<Bytes>(body, words);
      break;
    case MaskKind::dense:
    case MaskKind::empty: std::memset(masks, kind == MaskKind::dense ? 0xff : 0, sizeof words); return 0;
  }
  from_stored_order<Bytes>(words, masks);
  return size;
}

// Whether a mask keeps nothing at or after element `limit` of the block.
template <int Bytes>
inline bool within(const std::uint32_t* masks, int limit) {
  using L = BlockLayout<Bytes>;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int e = 0; e < L::kLaneElements; ++e) {
      if ((masks[lane * L::kLaneMaskWords + e / 32] >> e % 32 & 1) && L::element(lane, e) >= limit) return false;
    }
  }
  return true;
}

template <int Bytes>
inline void restore_block(const std::uint8_t* codes, int count, int width, std::uint32_t reference, bool rotate,
                          const std::uint32_t* masks, std::uint8_t* block) {
  alignas(64) Uint<Bytes> values[BlockLayout<Bytes>::kBlockElements + 64];
  unpack_codes<Bytes>(codes, count, width, values);
  if (reference != 0) {
    for (int i = 0; i < count; ++i) values[i] = static_cast<Uint<Bytes>>(values[i] + reference);
  }
  if (rotate) rotate_right<Bytes>(values, count);
  expand<Bytes>(values, masks, block);
}

template <int Bytes>
TileError decode_tile(const std::uint8_t* blob, std::uint32_t units, std::uint32_t kept, std::uint32_t elements,
                      const DecodeRules& rules, std::uint8_t* out) {
  using L = BlockLayout<Bytes>;
  constexpr int kBlockElements = L::kBlockElements;
  const int blob_words = static_cast<int>(4 * units);
  int words = L::kBlocksPerTile;
  if (blob_words < words) return {"words of the blob, at least", 0, words, blob_words};
  std::int64_t masked = 0, dense = 0;  // kept elements in masks; elements of dense blocks, kept or not
  for (int b = 0; b < L::kBlocksPerTile; ++b) {
    const auto header = load<std::uint32_t>(blob + 4 * b);
    const int offset = static_cast<int>(L::header_offset(header));
    const int width = static_cast<int>(L::header_width(header));
    const MaskKind kind = L::header_kind(header);
    const std::int64_t left = static_cast<std::int64_t>(elements) - b * kBlockElements;
    const int limit = left <= 0 ? 0 : left < kBlockElements ? static_cast<int>(left) : kBlockElements;
    if (offset != words) return {"body offset in words", b, words, offset};
    if (width < L::kMinWidth) return {"code width, at least", b, L::kMinWidth, width};
    if (width > L::kBits) return {"code width, at most", b, L::kBits, width};
    if (kind == MaskKind::two_level && !rules.may_be_two_level) {
      return {"mask kind", b, static_cast<std::int64_t>(MaskKind::flat), static_cast<std::int64_t>(kind)};
    }
    if (kind == MaskKind::dense && limit < kBlockElements) {
      return {"elements of a dense block", b, kBlockElements, limit};
    }

    alignas(64) std::uint32_t masks[L::kFlatMaskWords];
    const std::uint8_t* body = blob + 4 * static_cast<std::size_t>(words);
    const int mask_words = read_mask<Bytes>(kind, body, blob_words - words, masks);
    if (mask_words < 0) return {"words left in the blob for the mask, at least", b, -mask_words, blob_words - words};
    const int count = kept_count<Bytes>(masks);
    if (limit < kBlockElements && count != 0 && !within<Bytes>(masks, limit)) {
      return {"end of the mask's kept elements, at most", b, limit, kBlockElements};
    }
    const int body_words = mask_words + (count * width + 31) / 32;
    if (body_words > blob_words - words) {
      return {"words left in the blob for the body, at least", b, body_words, blob_words - words};
    }
    words += body_words;
    (kind == MaskKind::dense ? dense : masked) += count;

    if (out == nullptr || limit == 0) continue;
    std::uint8_t* block = out + static_cast<std::size_t>(b) * kBlockElements * Bytes;
    const std::uint8_t* codes = body + 4 * mask_words;
    if (limit < kBlockElements) {
      alignas(64) std::uint8_t whole[kBlockElements * Bytes];
      restore_block<Bytes>(codes, count, width, L::header_reference(header), rules.rotate, masks, whole);
      std::memcpy(block, whole, static_cast<std::size_t>(limit) * Bytes);
    } else if (count == 0) {
      std::memset(block, 0, kBlockElements * Bytes);
    } else {
      restore_block<Bytes>(codes, count, width, L::header_reference(header), rules.rotate, masks, block);
    }
  }
  if ((words + 3) / 4 != static_cast<int>(units)) {
    return {"units of the blob", L::kBlocksPerTile - 1, (words + 3) / 4, units};
  }
  if (kept < masked) return {"kept elements of the tile, at least", L::kBlocksPerTile - 1, masked, kept};
  if (kept > masked + dense) return {"kept elements of the tile, at most", L::kBlocksPerTile - 1, masked + dense, kept};
  return {};
}

}  // namespace bitsparse::cpu::BITSPARSE_ISA
