// Elements -> blob, in two passes: `plan` decides how each block is stored, `encode` writes it.
#pragma once

#include "cpu/bitstream.h"
#include "cpu/block_mask.h"

namespace bitsparse::cpu::BITSPARSE_ISA {

inline int max_of(int a, int b) { return a > b ? a : b; }

// One block's place in its tile: the elements, padded with zeros if the tensor ends in the block.
template <int Bytes>
class BlockInput {
  static constexpr int kBlockElements = BlockLayout<Bytes>::kBlockElements;

 public:
  BlockInput(const std::uint8_t* tile, int block, std::uint32_t elements) {
    const std::int64_t left = static_cast<std::int64_t>(elements) - block * kBlockElements;
    count_ = left < 0 ? 0 : left > kBlockElements ? kBlockElements : static_cast<int>(left);
    data_ = tile + static_cast<std::size_t>(block) * kBlockElements * Bytes;
    if (!full() && !none()) {
      std::memcpy(padded_, data_, static_cast<std::size_t>(count_) * Bytes);
      std::memset(padded_ + count_ * Bytes, 0, static_cast<std::size_t>(kBlockElements - count_) * Bytes);
      data_ = padded_;
    }
  }
  BlockInput(const BlockInput&) = delete;
  BlockInput& operator=(const BlockInput&) = delete;

  bool none() const { return count_ == 0; }
  bool full() const { return count_ == kBlockElements; }
  const std::uint8_t* data() const { return data_; }

 private:
  int count_;
  const std::uint8_t* data_;
  alignas(64) std::uint8_t padded_[kBlockElements * Bytes];
};

struct BlockPlan {
  std::uint32_t header;
  int words;  // of the body
  int kept;
};

template <int Bytes>
inline BlockPlan plan_block(const BlockInput<Bytes>& in, const EncodeRules& rules, std::uint32_t offset_words) {
  using L = BlockLayout<Bytes>;
  const BlockPlan empty{L::make_header(offset_words, L::kMinWidth, MaskKind::empty, 0), 0, 0};
  if (in.none()) return empty;
  alignas(64) std::uint32_t masks[L::kFlatMaskWords], words[L::kFlatMaskWords];
  const Range range = scan<Bytes>(in.data(), rules.threshold, rules.rotate, masks);
  const int kept = kept_count<Bytes>(masks);
  if (kept == 0) return empty;

  int width = L::kBits, dense_width = L::kBits;
  std::uint32_t stored_reference = 0;
  if (rules.codec == Codec::signless) {
    width = dense_width = max_of(L::kBits - 1, bit_length(range.high));
  } else if (rules.codec == Codec::tight) {
    stored_reference = range.low >> L::kReferenceDrop;
    width = max_of(L::kMinWidth, bit_length(range.high - (stored_reference << L::kReferenceDrop)));
    dense_width = max_of(L::kMinWidth, bit_length(range.high));
  }

  to_stored_order<Bytes>(masks, words);
  const int two_level = may_be_two_level(rules.codec) ? two_level_size<Bytes>(words) : L::kFlatMaskWords;
  const MaskKind kind = two_level < L::kFlatMaskWords ? MaskKind::two_level : MaskKind::flat;
  const int body = (kind == MaskKind::flat ? L::kFlatMaskWords : two_level) + (kept * width + 31) / 32;
  const int dense = L::kLaneElements * dense_width;
  if (in.full() && body >= dense) {
    return {L::make_header(offset_words, dense_width, MaskKind::dense, 0), dense, kept};
  }
  return {L::make_header(offset_words, width, kind, stored_reference), body, kept};
}

template <int Bytes>
inline void encode_block(const BlockInput<Bytes>& in, const EncodeRules& rules, std::uint32_t header,
                         std::uint8_t* out) {
  using L = BlockLayout<Bytes>;
  const MaskKind kind = L::header_kind(header);
  if (kind == MaskKind::empty) return;
  constexpr int kBlockElements = L::kBlockElements;
  alignas(64) std::uint32_t masks[L::kFlatMaskWords], words[L::kFlatMaskWords];
  alignas(64) Uint<Bytes> patterns[kBlockElements + 64];
  int count = select<Bytes>(in.data(), rules.threshold, masks, patterns);
  if (kind == MaskKind::dense) {
    if (count < kBlockElements) {
      alignas(64) std::uint8_t zero_filled[kBlockElements * Bytes];
      expand<Bytes>(patterns, masks, zero_filled);
      to_lanes<Bytes>(zero_filled, patterns);
      count = kBlockElements;
    }
  } else {
    to_stored_order<Bytes>(masks, words);
    out += 4 * write_mask<Bytes>(words, kind, out);
  }
  if (rules.rotate) rotate_left<Bytes>(patterns, count);
  if (const auto reference = static_cast<Uint<Bytes>>(L::header_reference(header)); reference != 0) {
    for (int i = 0; i < count; ++i) patterns[i] = static_cast<Uint<Bytes>>(patterns[i] - reference);
  }
  pack_codes<Bytes>(patterns, count, static_cast<int>(L::header_width(header)), out);
}

template <int Bytes>
std::uint32_t plan_tile(const std::uint8_t* in, std::uint32_t elements, const EncodeRules& rules,
                        std::uint32_t* headers, std::uint32_t* kept) {
  std::uint32_t words = BlockLayout<Bytes>::kBlocksPerTile;
  *kept = 0;
  for (int b = 0; b < BlockLayout<Bytes>::kBlocksPerTile; ++b) {
    const BlockPlan plan = plan_block<Bytes>(BlockInput<Bytes>(in, b, elements), rules, words);
    headers[b] = plan.header;
    words += static_cast<std::uint32_t>(plan.words);
    *kept += static_cast<std::uint32_t>(plan.kept);
  }
  return (words + 3) / 4;
}

template <int Bytes>
void encode_tile(const std::uint8_t* in, std::uint32_t elements, const EncodeRules& rules, const std::uint32_t* headers,
                 std::uint8_t* blob) {
  using L = BlockLayout<Bytes>;
  std::memcpy(blob, headers, 4 * L::kBlocksPerTile);
  for (int b = 0; b < L::kBlocksPerTile; ++b) {
    encode_block<Bytes>(BlockInput<Bytes>(in, b, elements), rules, headers[b], blob + 4 * L::header_offset(headers[b]));
  }
}

}  // namespace bitsparse::cpu::BITSPARSE_ISA
