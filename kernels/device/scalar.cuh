// Arithmetic on the elements of one 32-bit word (4 / 2 / 1 of them), by dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "bitsparse/format.h"
#include "device/ptx.cuh"
#include "launch.h"

// Before sm_89 conversions of 8-bit floats are long code: one copy, out of line.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
#define BITSPARSE_FLOAT8 __device__ __noinline__
#else
#define BITSPARSE_FLOAT8 __device__ __forceinline__
#endif

namespace bitsparse::kernels {

// positive_mask(x): all bits of every element that is > 0 or NaN.
// square(relu), square_gradient(relu, grad): relu² and grad * 2 relu.
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
// product is what PyTorch's float multiply and round gives. PyTorch rounds 2 * relu first, then the product.
template <class Pair>
struct HalfPair {
  static constexpr int kBytes = 2;
  static constexpr std::uint32_t kNaN = 0x7fff7fffu;
  static __device__ __forceinline__ std::uint32_t positive_mask(std::uint32_t x) {
    return __hgtu2_mask(as_pair<Pair>(x), as_pair<Pair>(0u));
  }
  static __device__ __forceinline__ std::uint32_t square(std::uint32_t relu) {
    return as_word(__hmul2_rn(as_pair<Pair>(relu), as_pair<Pair>(relu)));
  }
  static __device__ __forceinline__ std::uint32_t square_gradient(std::uint32_t relu, std::uint32_t grad) {
    const Pair r = as_pair<Pair>(relu);
    return as_word(__hmul2_rn(__hadd2_rn(r, r), as_pair<Pair>(grad)));
  }
};

// Four 8-bit floats whose magnitudes >= 0x80 - NaNs are NaN. The sums cannot carry from one byte into the next.
//
// Results are those of exact arithmetic, rounded once, to nearest even, and saturating: half precision holds every
// product that does not saturate, or is too small to round to anything but zero. So the gradient's product comes first
// and is doubled then; 2 * relu alone could overflow.
template <std::uint32_t NaNs, __nv_fp8_interpretation_t Format>
struct ByteQuad {
  static constexpr int kBytes = 1;
  static constexpr std::uint32_t kNaN = 0x7f7f7f7fu;
  static __device__ __forceinline__ std::uint32_t positive_mask(std::uint32_t x) {
    const std::uint32_t magnitude = x & 0x7f7f7f7fu;
    const std::uint32_t nonzero = magnitude + 0x7f7f7f7fu;
    const std::uint32_t nan = magnitude + NaNs * 0x01010101u;
    return spread_top_bits((nonzero & ~x) | nan);
  }
  static __device__ __forceinline__ std::uint32_t square(std::uint32_t relu) {
    const Halves r = widen(relu);
    return narrow({__hmul2_rn(r.low, r.low), __hmul2_rn(r.high, r.high)});
  }
  static __device__ __forceinline__ std::uint32_t square_gradient(std::uint32_t relu, std::uint32_t grad) {
    const Halves r = widen(relu), g = widen(grad);
    const __half2 low = __hmul2_rn(r.low, g.low), high = __hmul2_rn(r.high, g.high);
    return narrow({__hadd2_rn(low, low), __hadd2_rn(high, high)});
  }

 private:
  struct Halves {
    __half2 low, high;
  };
  static BITSPARSE_FLOAT8 Halves widen(std::uint32_t x) {
    __nv_fp8x2_storage_t low, high;  // not shifted: the conversion takes either half of a register
    asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(x));
    return {__nv_cvt_fp8x2_to_halfraw2(low, Format), __nv_cvt_fp8x2_to_halfraw2(high, Format)};
  }
  static BITSPARSE_FLOAT8 std::uint32_t narrow(Halves x) {
    const std::uint32_t low = __nv_cvt_halfraw2_to_fp8x2(x.low, __NV_SATFINITE, Format);
    return low | static_cast<std::uint32_t>(__nv_cvt_halfraw2_to_fp8x2(x.high, __NV_SATFINITE, Format)) << 16;
  }
};
}  // namespace detail
#undef BITSPARSE_FLOAT8

template <>
struct Scalar<DType::bfloat16> : detail::HalfPair<__nv_bfloat162> {};
template <>
struct Scalar<DType::float16> : detail::HalfPair<__half2> {};
template <>
struct Scalar<DType::float8_e4m3fn> : detail::ByteQuad<1, __NV_E4M3> {};
template <>
struct Scalar<DType::float8_e5m2> : detail::ByteQuad<3, __NV_E5M2> {};
template <>
struct Scalar<DType::float32> {
  static constexpr int kBytes = 4;
  static constexpr std::uint32_t kNaN = 0x7fffffffu;
  static __device__ __forceinline__ std::uint32_t positive_mask(std::uint32_t x) {
    return __uint_as_float(x) <= 0.0f ? 0u : 0xffffffffu;
  }
  static __device__ __forceinline__ std::uint32_t square(std::uint32_t relu) {
    return __float_as_uint(__fmul_rn(__uint_as_float(relu), __uint_as_float(relu)));
  }
  static __device__ __forceinline__ std::uint32_t square_gradient(std::uint32_t relu, std::uint32_t grad) {
    const float r = __uint_as_float(relu);
    return __float_as_uint(__fmul_rn(__fadd_rn(r, r), __uint_as_float(grad)));
  }
};

// All bits of every element that is kept.
template <DType D, Keep K>
__device__ __forceinline__ std::uint32_t keep_mask(std::uint32_t x) {
  if constexpr (K == Keep::positive) {
    return Scalar<D>::positive_mask(x);
  } else {
    static_assert(Scalar<D>::kBytes == 1, "larger ones: nonzero_mask_bits");
    return spread_top_bits(((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x);
  }
}

// Activation of a word whose elements that relu drops are already zero.
template <DType D, Epilogue E>
__device__ __forceinline__ std::uint32_t activate(std::uint32_t relu) {
  if constexpr (E == Epilogue::relu_squared) return Scalar<D>::square(relu);
  return relu;
}

// grad * derivative, +0 where relu is zero.
template <DType D, Epilogue E>
__device__ __forceinline__ std::uint32_t activation_gradient(std::uint32_t relu, std::uint32_t grad) {
  const std::uint32_t kept = Scalar<D>::positive_mask(relu);
  if constexpr (E == Epilogue::relu_squared) grad = Scalar<D>::square_gradient(relu, grad);
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
