// Element selection with AVX-512 VBMI2: compress and expand do four chunks of a lane at once.
#pragma once

#include <immintrin.h>

#include "cpu/simd_common.h"

namespace bitsparse::cpu::BITSPARSE_ISA {

inline __m128i load_chunk(const std::uint8_t* block, int chunk) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + chunk * kChunkBytes));
}
inline void store_chunk(std::uint8_t* block, int chunk, __m128i value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(block + chunk * kChunkBytes), value);
}

// Chunks first, first + 32, first + 64, first + 96 of a block.
inline __m512i load_chunks(const std::uint8_t* block, int first) {
  __m512i v = _mm512_castsi128_si512(load_chunk(block, first));
  v = _mm512_inserti32x4(v, load_chunk(block, first + kLanes), 1);
  v = _mm512_inserti32x4(v, load_chunk(block, first + 2 * kLanes), 2);
  return _mm512_inserti32x4(v, load_chunk(block, first + 3 * kLanes), 3);
}
inline void store_chunks(std::uint8_t* block, int first, __m512i v) {
  store_chunk(block, first, _mm512_castsi512_si128(v));
  store_chunk(block, first + kLanes, _mm512_extracti32x4_epi32(v, 1));
  store_chunk(block, first + 2 * kLanes, _mm512_extracti32x4_epi32(v, 2));
  store_chunk(block, first + 3 * kLanes, _mm512_extracti32x4_epi32(v, 3));
}

// Four chunks of a lane in one register: all of a lane, with four-byte elements half of one.
template <int Bytes>
struct Vector;

template <>
struct Vector<1> {
  using Mask = __mmask64;
  __m512i v;
  static Vector all(std::uint32_t x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
  Mask kept(Vector threshold) const {
    return _mm512_cmpgt_epi8_mask(v, _mm512_setzero_si512()) | _mm512_cmpgt_epu8_mask(v, threshold.v);
  }
  Vector compress(Mask mask) const { return {_mm512_maskz_compress_epi8(mask, v)}; }
  Vector expand(Mask mask) const { return {_mm512_maskz_expand_epi8(mask, v)}; }
};

template <>
struct Vector<2> {
  using Mask = __mmask32;
  __m512i v;
  static Vector all(std::uint32_t x) { return {_mm512_set1_epi16(static_cast<short>(x))}; }
  Mask kept(Vector threshold) const {
    return _mm512_cmpgt_epi16_mask(v, _mm512_setzero_si512()) | _mm512_cmpgt_epu16_mask(v, threshold.v);
  }
  Vector compress(Mask mask) const { return {_mm512_maskz_compress_epi16(mask, v)}; }
  Vector expand(Mask mask) const { return {_mm512_maskz_expand_epi16(mask, v)}; }
};

template <>
struct Vector<4> {
  using Mask = __mmask16;
  __m512i v;
  static Vector all(std::uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
  Mask kept(Vector threshold) const {
    return static_cast<Mask>(_mm512_cmpgt_epi32_mask(v, _mm512_setzero_si512()) |
                             _mm512_cmpgt_epu32_mask(v, threshold.v));
  }
  Vector compress(Mask mask) const { return {_mm512_maskz_compress_epi32(mask, v)}; }
  Vector expand(Mask mask) const { return {_mm512_maskz_expand_epi32(mask, v)}; }
};

// Vectors of a block, in lane-major order, and the first of a vector's chunks. Its part of a mask is as many bits from
// bit `vector` times that on.
template <int Bytes>
constexpr int kVectors = BlockLayout<Bytes>::kBlockElements / (64 / Bytes);

template <int Bytes>
inline int first_chunk(int vector) {
  constexpr int kPerLane = BlockLayout<Bytes>::kChunksPerLane / 4;
  return vector / kPerLane + vector % kPerLane * 4 * kLanes;
}

// Whole vectors are stored, of which the first elements count: faster than a masked compress to memory.
template <int Bytes>
inline int select(const std::uint8_t* block, std::uint32_t threshold, std::uint32_t* masks, Uint<Bytes>* kept) {
  using V = Vector<Bytes>;
  const V limit = V::all(threshold);
  int n = 0;
  for (int i = 0; i < kVectors<Bytes>; ++i) {
    prefetch_ahead(block, i);
    const V v{load_chunks(block, first_chunk<Bytes>(i))};
    const auto mask = v.kept(limit);
    store_part(masks, i, mask);
    _mm512_storeu_si512(kept + n, v.compress(mask).v);
    n += static_cast<int>(_mm_popcnt_u64(mask));
  }
  return n;
}

template <int Bytes>
inline void expand(const Uint<Bytes>* values, const std::uint32_t* masks, std::uint8_t* block) {
  using V = Vector<Bytes>;
  for (int i = 0; i < kVectors<Bytes>; ++i) {
    const auto mask = load_part<typename V::Mask>(masks, i);
    store_chunks(block, first_chunk<Bytes>(i), V{_mm512_loadu_si512(values)}.expand(mask).v);
    values += _mm_popcnt_u64(mask);
  }
}

}  // namespace bitsparse::cpu::BITSPARSE_ISA
