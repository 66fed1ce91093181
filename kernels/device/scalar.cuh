// Arithmetic on the elements of one 32-bit word (4 / 2 / 1 of them), by dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "bitsparse/format.h"
#include "launch.h"

namespace bitsparse::kernels {

// positive_mask(x): all bits of every element that is > 0 or NaN. The other members exist for dtypes that have
// activations.
template <DType D>
struct Scalar;

namespace detail {
template <class Pair>
__device__ __forceinline__ Pair as_pair(std::uint32_t x) {
  Pair p;
  *reinterpret_cast<std::uint32_t*>(&p) = x;
  return p;
}
template <class Pair>
__device__ __forceinline__ std::uint32_t as_word(Pair p) {
  return *reinterpret_cast<std::uint32_t*>(&p);
}

// Two half-precision values. The `_rn` forms are never contracted into a fused multiply-add; one rounding of the exact
// product is what PyTorch's float multiply and round gives.
template <class Pair>
struct HalfPair {
  static constexpr int kBytes = 2;
  static constexpr std::uint32_t kNaN = 0x7fff7fffu;
  static __device__ __forceinline__ std::uint32_t positive_mask(std::uint32_t x) {
    return __hgtu2_mask(as_pair<Pair>(x), as_pair<Pair>(0u));
  }
  static __device__ __forceinline__ std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    return as_word(__hmul2_rn(as_pair<Pair>(a), as_pair<Pair>(b)));
  }
  static __device__ __forceinline__ std::uint32_t twice(std::uint32_t a) {
    return as_word(__hadd2_rn(as_pair<Pair>(a), as_pair<Pair>(a)));
  }
};

// Four 8-bit floats whose magnitudes >= 0x80 - NaNs are NaN. The sums cannot carry from one byte into the next.
template <std::uint32_t NaNs>
struct ByteQuad {
  static constexpr int kBytes = 1;
  static constexpr std::uint32_t kNaN = 0x7f7f7f7fu;
  static __device__ __forceinline__ std::uint32_t positive_mask(std::uint32_t x) {
    const std::uint32_t magnitude = x & 0x7f7f7f7fu;
    const std::uint32_t nonzero = magnitude + 0x7f7f7f7fu;
    const std::uint32_t nan = magnitude + NaNs * 0x01010101u;
    std::uint32_t mask;  // selectors 8..11 replicate the top bit of bytes 0..3
    asm("prmt.b32 %0, %1, %1, 0xba98;" : "=r"(mask) : "r"((nonzero & ~x) | nan));
    return mask;
  }
};
}  // namespace detail

template <>
struct Scalar<DType::bfloat16> : detail::HalfPair<__nv_bfloat162> {};
template <>
struct Scalar<DType::float16> : detail::HalfPair<__half2> {};
template <>
struct Scalar<DType::float8_e4m3fn> : detail::ByteQuad<1> {};
template <>
struct Scalar<DType::float8_e5m2> : detail::ByteQuad<3> {};
template <>
struct Scalar<DType::float32> {
  static constexpr int kBytes = 4;
  static constexpr std::uint32_t kNaN = 0x7fffffffu;
  static __device__ __forceinline__ std::uint32_t positive_mask(std::uint32_t x) {
    return __uint_as_float(x) <= 0.0f ? 0u : 0xffffffffu;
  }
  static __device__ __forceinline__ std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    return __float_as_uint(__fmul_rn(__uint_as_float(a), __uint_as_float(b)));
  }
  static __device__ __forceinline__ std::uint32_t twice(std::uint32_t a) {
    return __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(a)));
  }
};

// Activation of a word whose elements that relu drops are already zero.
template <DType D, Epilogue E>
__device__ __forceinline__ std::uint32_t activate(std::uint32_t relu) {
  if constexpr (E == Epilogue::relu_squared) return Scalar<D>::multiply(relu, relu);
  return relu;
}

// grad * derivative, +0 where relu is zero. PyTorch rounds 2 * relu first, then the product.
template <DType D, Epilogue E>
__device__ __forceinline__ std::uint32_t activation_gradient(std::uint32_t relu, std::uint32_t grad) {
  const std::uint32_t kept = Scalar<D>::positive_mask(relu);
  if constexpr (E == Epilogue::relu_squared) grad = Scalar<D>::multiply(Scalar<D>::twice(relu), grad);
  return grad & kept;
}

// The sign bit moves to bit 0 of each element, and back.
template <int Bytes>
__device__ __forceinline__ std::uint32_t rotate_sign(std::uint32_t x) {
  if constexpr (Bytes == 4) return x << 1 | x >> 31;
  if constexpr (Bytes == 2) return (x & 0x7fff7fffu) << 1 | ((x >> 15) & 0x00010001u);
  if constexpr (Bytes == 1) return (x & 0x7f7f7f7fu) << 1 | ((x >> 7) & 0x01010101u);
}
template <int Bytes>
__device__ __forceinline__ std::uint32_t unrotate_sign(std::uint32_t x) {
  if constexpr (Bytes == 4) return x >> 1 | x << 31;
  if constexpr (Bytes == 2) return ((x >> 1) & 0x7fff7fffu) | (x & 0x00010001u) << 15;
  if constexpr (Bytes == 1) return ((x >> 1) & 0x7f7f7f7fu) | (x & 0x01010101u) << 7;
}

}  // namespace bitsparse::kernels
