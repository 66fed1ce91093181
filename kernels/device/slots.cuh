// A block's kept elements side by side in shared memory, in rank order.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/byte_moves.cuh"
#include "device/codes.cuh"
#include "device/mask.cuh"
#include "device/ptx.cuh"
#include "device/scalar.cuh"
#include "device/slot_type.cuh"
#include "tuning.h"

namespace bitsparse::kernels {

// Two predicated stores for a word of two half-precision elements. One comparison sets both predicates.
#define BITSPARSE_PUSH_PAIR(type)                                                                  \
  asm volatile("{.reg .pred p, q; .reg .b16 l, h; setp.gtu." type                                  \
               " p|q, %1, %2; mov.b32 {l, h}, %1; @p st.shared.b16 [%0], l; @p add.u32 %0, %0, 2;" \
               " @q st.shared.b16 [%0], h; @q add.u32 %0, %0, 2;}"                                 \
               : "+r"(p)                                                                           \
               : "r"(x), "r"(0u)                                                                   \
               : "memory")
// A predicated store of one element.
#define BITSPARSE_PUSH(store, constraint, element)                                             \
  asm volatile("{.reg .pred p; .reg .b32 t; and.b32 t, %2, %3; setp.ne.u32 p, t, 0; @p " store \
               " [%0], %1; @p add.u32 %0, %0, %4;}"                                            \
               : "+r"(p)                                                                       \
               : constraint(element), "r"(mask), "r"(bit), "n"(kBytes)                         \
               : "memory")

// Before gathering: zeroes the slots from `count` to the next multiple of what a lane codes at once, and not more than
// two words. Bytes are gathered by words: theirs begin with the word of the last slot.
template <int Bytes>
__device__ __forceinline__ void pad_slots(std::uint32_t* slots, std::uint32_t count, int lane) {
  if constexpr (Bytes == 1) {
    if (lane < 2) slots[count / 4 + lane] = 0;
  } else {
    store_shared_if<Bytes>(lane < static_cast<int>(Codes<Bytes>::kPerLane) - 1,
                           reinterpret_cast<Slot<Bytes>*>(slots) + count + lane, 0);
  }
}

// The same for slots that are codes: to the end of their last word only.
template <int Bytes>
__device__ __forceinline__ void pad_word(std::uint32_t* slots, std::uint32_t count, int lane) {
  if constexpr (Bytes == 1) {
    if (lane == 0 && count % 4 != 0) slots[count / 4] = 0;
  } else {
    constexpr std::uint32_t kPerWord = 4 / Bytes;
    if (lane < (-count & (kPerWord - 1))) reinterpret_cast<Slot<Bytes>*>(slots)[count + lane] = 0;
  }
}

// Warp-wide, once the reference is known: padding whose codes are 0. Only for bytes, which are not compared with it one
// by one. Other lanes have looked at the word that holds it.
template <int Bytes>
__device__ __forceinline__ void pad_with_reference(std::uint32_t* slots, std::uint32_t count, std::uint32_t reference,
                                                   int lane) {
  if constexpr (Bytes == 1) {
    __syncwarp();
    if (lane < (-count & (Codes<Bytes>::kPerLane - 1)))
      reinterpret_cast<std::uint8_t*>(slots)[count + lane] = static_cast<std::uint8_t>(reference);
  }
}

// Stores the kept elements of `x`, the lane's J-th word, from shared address `p` on.
template <DType D, Keep K, int J>
__device__ __forceinline__ void push_word(std::uint32_t& p, std::uint32_t x, std::uint32_t mask) {
  constexpr int kBytes = Scalar<D>::kBytes;
  if constexpr (D == DType::bfloat16 && K == Keep::positive && Target::kBfloat16Compare) {
    BITSPARSE_PUSH_PAIR("bf16x2");
  } else if constexpr (D == DType::float16 && K == Keep::positive) {
    BITSPARSE_PUSH_PAIR("f16x2");
  } else {
#pragma unroll
    for (int k = 0; k < 4 / kBytes; ++k) {
      const std::uint32_t element = x >> (k * 8 * kBytes % 32);
      const std::uint32_t bit = 1u << BlockLayout<kBytes>::mask_bit(J * (4 / kBytes) + k);
      if constexpr (kBytes == 4) BITSPARSE_PUSH("st.shared.b32", "r", element);
      if constexpr (kBytes == 2) BITSPARSE_PUSH("st.shared.b16", "h", static_cast<std::uint16_t>(element));
    }
  }
}

#undef BITSPARSE_PUSH
#undef BITSPARSE_PUSH_PAIR

namespace detail {
template <DType D, Keep K, int J, int Chunks>
__device__ __forceinline__ void push_words(std::uint32_t& p, const uint4 (&elements)[Chunks], std::uint32_t mask) {
  if constexpr (J < 4 * Chunks) {
    const uint4& chunk = elements[J / 4];
    push_word<D, K, J>(p, J % 4 == 0 ? chunk.x : J % 4 == 1 ? chunk.y : J % 4 == 2 ? chunk.z : chunk.w, mask);
    push_words<D, K, J + 1>(p, elements, mask);
  }
}
}  // namespace detail

// The lane's kept elements from slot `rank` on.
template <DType D, Keep K, int Chunks>
__device__ __forceinline__ void gather_kept(std::uint32_t* slots, std::uint32_t rank, const uint4 (&elements)[Chunks],
                                            const LaneMask<Scalar<D>::kBytes>& mask,
                                            const ByteMoves<Scalar<D>::kBytes>& moves) {
  if constexpr (Scalar<D>::kBytes == 1) {
    ByteWriter writer(slots, rank);
#pragma unroll
    for (int i = 0; i < Chunks; ++i) {
      const std::uint32_t x[4] = {elements[i].x, elements[i].y, elements[i].z, elements[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const ByteMove move = moves.of(mask.of(4 * i) >> (16 * (i % 2) + 4 * j));
        writer.append(move(x[j]), move.bits());
      }
    }
    __syncwarp();
    writer.finish();
  } else {
    std::uint32_t p = shared_address(slots) + rank * Scalar<D>::kBytes;
    detail::push_words<D, K, 0>(p, elements, mask.words[0]);
  }
}

// All of the lane's elements, those that are not kept as zero, their signs rotated if wanted. Only bytes may be there
// that are neither kept nor zero.
template <bool Rotate, int Bytes, int Chunks>
__device__ __forceinline__ void gather_all(std::uint32_t* slots, const uint4 (&elements)[Chunks],
                                           const LaneMask<Bytes>& mask, int lane) {
  const auto pattern = [](std::uint32_t x) { return Rotate && Bytes > 1 ? rotate_sign<Bytes>(x) : x; };
  std::uint32_t* p = slots + lane * 4 * Chunks;
#pragma unroll
  for (const uint4& chunk : elements) {
    *p++ = pattern(chunk.x);
    *p++ = pattern(chunk.y);
    *p++ = pattern(chunk.z);
    *p++ = pattern(chunk.w);
  }
  if constexpr (Bytes == 1) {  // rare: in a loop, for few registers
    p -= 4 * Chunks;
#pragma unroll
    for (std::uint32_t word : mask.words)
#pragma unroll 1
      for (const std::uint32_t* end = p + 8; p < end; word >>= 4, ++p) {
        const std::uint32_t kept = *p & kept_bytes(word);
        *p = Rotate ? rotate_sign<Bytes>(kept) : kept;
      }
  }
}

}  // namespace bitsparse::kernels
