// What is chosen per GPU architecture: which instructions there are, and how many warps a multiprocessor should hold.
//
// sm_90 was measured (docs/performance.md). The others follow from their registers, shared memory and instruction set.
#pragma once

#include "bitsparse/format.h"

namespace bitsparse::kernels {

// Warps of a multiprocessor that a kernel is compiled for: they set its registers. 48 warps leave 40 registers a
// thread. 4-byte elements hold twice the data in registers: 24 warps.
struct Warps {
  int narrow;  // 1- and 2-byte elements
  int wide;    // 4-byte elements
};

template <int Sm>
struct Tuning;

template <>
struct Tuning<80> {
  static constexpr bool kBulkCopy = false;         // blobs are copied by all threads
  static constexpr bool kBfloat16Compare = false;  // no packed bfloat16 comparison that sets two predicates
  static constexpr Warps kCompress{48, 24}, kRestore{48, 24};
};

template <>
struct Tuning<90> {
  static constexpr bool kBulkCopy = true;  // blobs are copied by the bulk copy engine
  static constexpr bool kBfloat16Compare = true;
  static constexpr Warps kCompress{48, 24}, kRestore{48, 24};
};

template <>
struct Tuning<100> : Tuning<90> {};

// Its multiprocessors' 100 KiB of shared memory hold fewer warps than their registers do.
template <>
struct Tuning<120> : Tuning<90> {};

#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000)
using Target = Tuning<90>;
#elif __CUDA_ARCH__ < 900
using Target = Tuning<80>;
#elif __CUDA_ARCH__ < 1200
using Target = Tuning<100>;
#else
using Target = Tuning<120>;
#endif

// Thread blocks of a multiprocessor.
constexpr int resident_blocks(Warps warps, DType dtype) {
  return (element_bytes(dtype) == 4 ? warps.wide : warps.narrow) / blocks_per_tile(dtype);
}

}  // namespace bitsparse::kernels
