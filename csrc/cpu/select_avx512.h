// Element selection with AVX-512 VBMI2: compress and expand do a lane of 32 elements at once.
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

// The elements of one lane in one register (with four-byte elements, of half a lane).
template <int Bytes>
struct Vector;

template <>
struct Vector<1> {
  __m256i v;
  static Vector all(std::uint32_t x) { return {_mm256_set1_epi8(static_cast<char>(x))}; }
  static Vector load(const void* from) { return {_mm256_loadu_si256(static_cast<const __m256i*>(from))}; }
  void store(void* to) const { _mm256_storeu_si256(static_cast<__m256i*>(to), v); }
  static Vector gather(const std::uint8_t* block, int lane) {
    return {
        _mm256_inserti128_si256(_mm256_castsi128_si256(load_chunk(block, lane)), load_chunk(block, lane + kLanes), 1)};
  }
  void scatter(std::uint8_t* block, int lane) const {
    store_chunk(block, lane, _mm256_castsi256_si128(v));
    store_chunk(block, lane + kLanes, _mm256_extracti128_si256(v, 1));
  }
  std::uint32_t kept(Vector threshold) const {
    return _mm256_cmpgt_epi8_mask(v, _mm256_setzero_si256()) | _mm256_cmpgt_epu8_mask(v, threshold.v);
  }
  Vector rotated() const { return {_mm256_sub_epi8(_mm256_add_epi8(v, v), _mm256_movm_epi8(_mm256_movepi8_mask(v)))}; }
  Vector min(std::uint32_t mask, Vector x) const { return {_mm256_mask_min_epu8(v, mask, v, x.v)}; }
  Vector max(std::uint32_t mask, Vector x) const { return {_mm256_mask_max_epu8(v, mask, v, x.v)}; }
  Vector compress(std::uint32_t mask) const { return {_mm256_maskz_compress_epi8(mask, v)}; }
  Vector expand(std::uint32_t mask) const { return {_mm256_maskz_expand_epi8(mask, v)}; }
};

template <>
struct Vector<2> {
  __m512i v;
  static Vector all(std::uint32_t x) { return {_mm512_set1_epi16(static_cast<short>(x))}; }
  static Vector load(const void* from) { return {_mm512_loadu_si512(from)}; }
  void store(void* to) const { _mm512_storeu_si512(to, v); }
  static Vector gather(const std::uint8_t* block, int lane) { return {load_chunks(block, lane)}; }
  void scatter(std::uint8_t* block, int lane) const { store_chunks(block, lane, v); }
  std::uint32_t kept(Vector threshold) const {
    return _mm512_cmpgt_epi16_mask(v, _mm512_setzero_si512()) | _mm512_cmpgt_epu16_mask(v, threshold.v);
  }
  Vector rotated() const { return {_mm512_or_si512(_mm512_add_epi16(v, v), _mm512_srli_epi16(v, 15))}; }
  Vector min(std::uint32_t mask, Vector x) const { return {_mm512_mask_min_epu16(v, mask, v, x.v)}; }
  Vector max(std::uint32_t mask, Vector x) const { return {_mm512_mask_max_epu16(v, mask, v, x.v)}; }
  Vector compress(std::uint32_t mask) const { return {_mm512_maskz_compress_epi16(mask, v)}; }
  Vector expand(std::uint32_t mask) const { return {_mm512_maskz_expand_epi16(mask, v)}; }
};

template <>
struct Vector<4> {
  __m512i v;
  static Vector all(std::uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
  static Vector load(const void* from) { return {_mm512_loadu_si512(from)}; }
  void store(void* to) const { _mm512_storeu_si512(to, v); }
  static Vector gather(const std::uint8_t* block, int lane) { return {load_chunks(block, lane)}; }
  void scatter(std::uint8_t* block, int lane) const { store_chunks(block, lane, v); }
  std::uint32_t kept(Vector threshold) const {
    return _mm512_cmpgt_epi32_mask(v, _mm512_setzero_si512()) | _mm512_cmpgt_epu32_mask(v, threshold.v);
  }
  Vector rotated() const { return {_mm512_rol_epi32(v, 1)}; }
  Vector min(std::uint32_t mask, Vector x) const { return {_mm512_mask_min_epu32(v, half(mask), v, x.v)}; }
  Vector max(std::uint32_t mask, Vector x) const { return {_mm512_mask_max_epu32(v, half(mask), v, x.v)}; }
  Vector compress(std::uint32_t mask) const { return {_mm512_maskz_compress_epi32(half(mask), v)}; }
  Vector expand(std::uint32_t mask) const { return {_mm512_maskz_expand_epi32(half(mask), v)}; }
  static __mmask16 half(std::uint32_t mask) { return static_cast<__mmask16>(mask); }
};

// Calls f(lane, first bit, first chunk) for every vector of a block.
template <int Bytes, class F>
inline void for_each_vector(F f) {
  for (int lane = 0; lane < kLanes; ++lane) {
    f(lane, 0, lane);
    if (Bytes == 4) f(lane, 16, lane + 4 * kLanes);
  }
}

template <int Bytes>
inline Range scan(const std::uint8_t* block, std::uint32_t threshold, bool rotate, std::uint32_t* masks) {
  using V = Vector<Bytes>;
  const V limit = V::all(threshold);
  V low = V::all(~0u), high = V::all(0);
  for_each_vector<Bytes>([&](int lane, int bit, int chunk) {
    if (bit == 0) prefetch_ahead<Bytes>(block, lane);
    V v = V::gather(block, chunk);
    const std::uint32_t mask = v.kept(limit);
    masks[lane] = bit == 0 ? mask : masks[lane] | mask << bit;
    if (rotate) v = v.rotated();
    low = low.min(mask, v);
    high = high.max(mask, v);
  });
  constexpr int kElements = sizeof(V) / Bytes;
  Uint<Bytes> lows[kElements], highs[kElements];
  low.store(lows);
  high.store(highs);
  for (int i = 1; i < kElements; ++i) {
    lows[0] = lows[i] < lows[0] ? lows[i] : lows[0];
    highs[0] = highs[i] > highs[0] ? highs[i] : highs[0];
  }
  return {lows[0], highs[0]};
}

// Whole vectors are stored, of which the first elements count: faster than a masked compress to memory.
template <int Bytes>
inline int select(const std::uint8_t* block, std::uint32_t threshold, std::uint32_t* masks, Uint<Bytes>* kept) {
  using V = Vector<Bytes>;
  const V limit = V::all(threshold);
  int n = 0;
  for_each_vector<Bytes>([&](int lane, int bit, int chunk) {
    if (bit == 0) prefetch_ahead<Bytes>(block, lane);
    const V v = V::gather(block, chunk);
    const std::uint32_t mask = v.kept(limit);
    masks[lane] = bit == 0 ? mask : masks[lane] | mask << bit;
    v.compress(mask).store(kept + n);
    n += popcount(mask);
  });
  return n;
}

template <int Bytes>
inline void expand(const Uint<Bytes>* values, const std::uint32_t* masks, std::uint8_t* block) {
  using V = Vector<Bytes>;
  for_each_vector<Bytes>([&](int lane, int bit, int chunk) {
    const std::uint32_t mask = Bytes == 4 ? masks[lane] >> bit & 0xffff : masks[lane];
    V::load(values).expand(mask).scatter(block, chunk);
    values += popcount(mask);
  });
}

}  // namespace bitsparse::cpu::BITSPARSE_ISA
