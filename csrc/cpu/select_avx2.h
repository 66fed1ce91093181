// Element selection with AVX2: a lane's chunks two at a time; a mask looks up the byte shuffle that moves elements.
#pragma once

#include <immintrin.h>

#include "cpu/simd_common.h"

namespace bitsparse::cpu::BITSPARSE_ISA {

// Shuffles for half a chunk (1-byte elements) or a whole one, by the mask of its elements.
template <int Bytes>
struct Shuffles {
  static constexpr int kElements = Bytes == 4 ? 4 : 8;
  static constexpr int kBytes = kElements * Bytes;
  static constexpr std::uint8_t kZero = 0x80;
  alignas(16) std::uint8_t compress[1 << kElements][kBytes]{};
  alignas(16) std::uint8_t expand[1 << kElements][kBytes]{};

  constexpr Shuffles() {
    for (int mask = 0; mask < 1 << kElements; ++mask) {
      int n = 0;
      for (int e = 0; e < kElements; ++e) {
        const bool kept = mask >> e & 1;
        for (int b = 0; b < Bytes; ++b) {
          if (kept) compress[mask][n * Bytes + b] = static_cast<std::uint8_t>(e * Bytes + b);
          expand[mask][e * Bytes + b] = kept ? static_cast<std::uint8_t>(n * Bytes + b) : kZero;
        }
        n += kept;
      }
    }
  }
};
template <int Bytes>
constexpr Shuffles<Bytes> kShuffles{};

inline __m128i load_chunk(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

// Two chunks of a lane.
template <int Bytes>
struct Pair;

template <>
struct Pair<1> {
  using Mask = std::uint32_t;
  __m256i v;
  static Pair all(std::uint32_t x) { return {_mm256_set1_epi8(static_cast<char>(x))}; }
  Pair above(Pair x) const { return {_mm256_cmpgt_epi8(v, x.v)}; }
  Pair top_flipped() const { return {_mm256_xor_si256(v, _mm256_set1_epi8(static_cast<char>(0x80)))}; }
  Mask bits() const { return static_cast<Mask>(_mm256_movemask_epi8(v)); }
};

template <>
struct Pair<2> {
  using Mask = std::uint16_t;
  __m256i v;
  static Pair all(std::uint32_t x) { return {_mm256_set1_epi16(static_cast<short>(x))}; }
  Pair above(Pair x) const { return {_mm256_cmpgt_epi16(v, x.v)}; }
  Pair top_flipped() const { return {_mm256_xor_si256(v, _mm256_set1_epi16(static_cast<short>(0x8000)))}; }
  Mask bits() const {  // saturated to bytes, each half's twice
    const auto twice = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_packs_epi16(v, v)));
    return static_cast<Mask>((twice & 0xff) | (twice >> 8 & 0xff00));
  }
};

template <>
struct Pair<4> {
  using Mask = std::uint8_t;
  __m256i v;
  static Pair all(std::uint32_t x) { return {_mm256_set1_epi32(static_cast<int>(x))}; }
  Pair above(Pair x) const { return {_mm256_cmpgt_epi32(v, x.v)}; }
  Pair top_flipped() const { return {_mm256_xor_si256(v, _mm256_set1_epi32(static_cast<int>(0x80000000)))}; }
  Mask bits() const { return static_cast<Mask>(_mm256_movemask_ps(_mm256_castsi256_ps(v))); }
};

// Pairs of a block in lane-major order; a pair's part of a mask follows that of the pair before.
template <int Bytes>
constexpr int kPairs = BlockLayout<Bytes>::kBlockElements* Bytes / 32;

template <int Bytes>
inline std::size_t pair_place(int pair) {  // of the first chunk; the second one is kLanes chunks later
  constexpr int kPerLane = BlockLayout<Bytes>::kChunksPerLane / 2;
  return static_cast<std::size_t>(pair / kPerLane + pair % kPerLane * 2 * kLanes) * kChunkBytes;
}

template <int Bytes>
inline Pair<Bytes> load_pair(const std::uint8_t* block, int pair) {
  const std::uint8_t* from = block + pair_place<Bytes>(pair);
  if (pair % 2 == 0) prefetch_ahead(block, pair / 2);
  return {
      _mm256_inserti128_si256(_mm256_castsi128_si256(load_chunk(from)), load_chunk(from + kLanes * kChunkBytes), 1)};
}

// All bits of the elements that are kept: positive, or above the largest negative number.
template <int Bytes>
struct Keeper {
  Pair<Bytes> zero = Pair<Bytes>::all(0), limit;
  explicit Keeper(std::uint32_t threshold) : limit(Pair<Bytes>::all(threshold).top_flipped()) {}
  Pair<Bytes> operator()(Pair<Bytes> x) const {
    return {_mm256_or_si256(x.above(zero).v, x.top_flipped().above(limit).v)};
  }
};

// Whole vectors are stored, of which the first elements count.
template <int Bytes>
inline int compress_chunk(__m128i chunk, std::uint32_t mask, Uint<Bytes>* kept) {
  const auto& shuffles = kShuffles<Bytes>.compress;
  if constexpr (Bytes == 1) {
    const std::uint32_t low = mask & 0xff, high = mask >> 8;
    const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(shuffles[low]));
    const __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(shuffles[high]));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(kept), _mm_shuffle_epi8(chunk, first));
    const int n = popcount(low);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(kept + n), _mm_shuffle_epi8(_mm_srli_si128(chunk, 8), second));
    return n + popcount(high);
  } else {
    store(kept, _mm_shuffle_epi8(chunk, load_chunk(shuffles[mask])));
    return popcount(mask);
  }
}

template <int Bytes>
inline int select(const std::uint8_t* block, std::uint32_t threshold, std::uint32_t* masks, Uint<Bytes>* kept) {
  constexpr int kHalf = 16 / Bytes;
  const Keeper<Bytes> keep(threshold);
  int n = 0;
  for (int i = 0; i < kPairs<Bytes>; ++i) {
    const Pair<Bytes> v = load_pair<Bytes>(block, i);
    const auto part = keep(v).bits();
    store_part(masks, i, part);
    const std::uint32_t mask = part;
    n += compress_chunk<Bytes>(_mm256_castsi256_si128(v.v), mask & ((1u << kHalf) - 1), kept + n);
    n += compress_chunk<Bytes>(_mm256_extracti128_si256(v.v, 1), mask >> kHalf, kept + n);
  }
  return n;
}

template <int Bytes>
inline __m128i expand_chunk(const Uint<Bytes>*& values, std::uint32_t mask) {
  const auto& shuffles = kShuffles<Bytes>.expand;
  if constexpr (Bytes == 1) {
    const std::uint32_t low = mask & 0xff, high = mask >> 8;
    const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(shuffles[low]));
    const __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(shuffles[high]));
    const __m128i a = _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values)), first);
    values += popcount(low);
    const __m128i b = _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values)), second);
    values += popcount(high);
    return _mm_unpacklo_epi64(a, b);
  } else {
    const __m128i chunk = _mm_shuffle_epi8(load_chunk(values), load_chunk(shuffles[mask]));
    values += popcount(mask);
    return chunk;
  }
}

template <int Bytes>
inline void expand(const Uint<Bytes>* values, const std::uint32_t* masks, std::uint8_t* block) {
  constexpr int kHalf = 16 / Bytes;
  for (int i = 0; i < kPairs<Bytes>; ++i) {
    const std::uint32_t mask = load_part<typename Pair<Bytes>::Mask>(masks, i);
    std::uint8_t* const to = block + pair_place<Bytes>(i);
    store(to, expand_chunk<Bytes>(values, mask & ((1u << kHalf) - 1)));
    store(to + kLanes * kChunkBytes, expand_chunk<Bytes>(values, mask >> kHalf));
  }
}

}  // namespace bitsparse::cpu::BITSPARSE_ISA
