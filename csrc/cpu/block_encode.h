// Elements -> blob, block by block: kept elements are put side by side, what is there decides the form.
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

// Smallest and largest of the patterns. Overwrites kRangeSlack elements behind them.
struct Range {
  std::uint32_t low, high;
};
constexpr int kRangeSlack = 64;
template <int Bytes>
inline Range range_of(Uint<Bytes>* patterns, int count) {
  constexpr int kStep = 64 / Bytes;  // that compilers turn into vectors
  for (int i = 0; i < kRangeSlack; ++i) patterns[count + i] = patterns[0];
  Uint<Bytes> lows[kStep], highs[kStep];
  for (int j = 0; j < kStep; ++j) lows[j] = highs[j] = patterns[0];
  for (int i = 0; i < count; i += kStep) {
    for (int j = 0; j < kStep; ++j) {
      const Uint<Bytes> x = patterns[i + j];
      lows[j] = x < lows[j] ? x : lows[j];
      highs[j] = x > highs[j] ? x : highs[j];
    }
  }
  Range range{lows[0], highs[0]};
  for (int j = 1; j < kStep; ++j) {
    range.low = lows[j] < range.low ? lows[j] : range.low;
    range.high = highs[j] > range.high ? highs[j] : range.high;
  }
  return range;
}

struct EncodedBlock {
  std::uint32_t header;
  int words;  // of the body
  int kept;
};

// Every element of the block, those that are not kept as zero.
template <int Bytes>
inline void encode_dense(const Uint<Bytes>* patterns, int kept, const std::uint32_t* masks, int width,
                         std::uint8_t* out) {
  constexpr int kBlockElements = BlockLayout<Bytes>::kBlockElements;
  alignas(64) Uint<Bytes> all[kBlockElements + kGroup];
  if (kept == kBlockElements) {
    std::memcpy(all, patterns, kBlockElements * Bytes);
  } else {
    alignas(64) std::uint8_t zero_filled[kBlockElements * Bytes];
    expand<Bytes>(patterns, masks, zero_filled);
    to_lanes<Bytes>(zero_filled, all);
  }
  pack_codes<Bytes>(all, kBlockElements, width, out);
}

template <int Bytes>
inline EncodedBlock encode_block(const BlockInput<Bytes>& in, const EncodeRules& rules, std::uint32_t offset_words,
                                 std::uint8_t* out) {
  using L = BlockLayout<Bytes>;
  const EncodedBlock empty{L::make_header(offset_words, L::kMinWidth, MaskKind::empty, 0), 0, 0};
  if (in.none()) return empty;
  alignas(64) std::uint32_t masks[L::kFlatMaskWords], words[L::kFlatMaskWords];
  alignas(64) Uint<Bytes> gathered[L::kBlockElements + kRangeSlack];
  // raw's codes are the patterns themselves, so they go to their place, behind a flat mask, at once.
  const bool raw = rules.codec == Codec::raw;
  Uint<Bytes>* const patterns = raw ? reinterpret_cast<Uint<Bytes>*>(out + 4 * L::kFlatMaskWords) : gathered;
  const int kept = select<Bytes>(in.data(), rules.threshold, masks, patterns);
  if (kept == 0) return empty;

  int width = L::kBits, dense_width = L::kBits;
  std::uint32_t stored_reference = 0;
  if (!raw) {
    if (rules.rotate) rotate_left<Bytes>(patterns, kept);
    const Range range = range_of<Bytes>(patterns, kept);
    const bool tight = rules.codec == Codec::tight;
    if (tight) stored_reference = range.low >> L::kReferenceDrop;
    const int least = tight ? L::kMinWidth : L::kBits - 1;
    width = max_of(least, bit_length(range.high - (stored_reference << L::kReferenceDrop)));
    dense_width = max_of(least, bit_length(range.high));
  }

  to_stored_order<Bytes>(masks, words);
  const int two_level = may_be_two_level(rules.codec) ? two_level_size<Bytes>(words) : L::kFlatMaskWords;
  const MaskKind kind = two_level < L::kFlatMaskWords ? MaskKind::two_level : MaskKind::flat;
  const int body = (kind == MaskKind::flat ? L::kFlatMaskWords : two_level) + (kept * width + 31) / 32;
  const int dense = L::kLaneElements * dense_width;
  if (in.full() && body >= dense) {
    encode_dense<Bytes>(patterns, kept, masks, dense_width, out);
    return {L::make_header(offset_words, dense_width, MaskKind::dense, 0), dense, kept};
  }
  out += 4 * write_mask<Bytes>(words, kind, out);
  if (raw) {
    std::memset(out + kept * Bytes, 0, kUnitBytes);
  } else {
    if (const auto reference = static_cast<Uint<Bytes>>(stored_reference << L::kReferenceDrop); reference != 0)
      for (int i = 0; i < kept; ++i) patterns[i] = static_cast<Uint<Bytes>>(patterns[i] - reference);
    pack_codes<Bytes>(patterns, kept, width, out);
  }
  return {L::make_header(offset_words, width, kind, stored_reference), body, kept};
}

template <int Bytes>
std::uint32_t encode_tile(const std::uint8_t* in, std::uint32_t elements, const EncodeRules& rules, std::uint8_t* blob,
                          std::uint32_t* kept) {
  std::uint32_t words = BlockLayout<Bytes>::kBlocksPerTile;
  *kept = 0;
  for (int b = 0; b < BlockLayout<Bytes>::kBlocksPerTile; ++b) {
    const EncodedBlock block = encode_block<Bytes>(BlockInput<Bytes>(in, b, elements), rules, words, blob + 4 * words);
    store(blob + 4 * b, block.header);
    words += static_cast<std::uint32_t>(block.words);
    *kept += static_cast<std::uint32_t>(block.kept);
  }
  return (words + 3) / 4;
}

}  // namespace bitsparse::cpu::BITSPARSE_ISA
