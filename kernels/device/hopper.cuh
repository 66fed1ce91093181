// What only sm_90a has: products of shared-memory matrices by a warpgroup, tensor copies to the thread blocks of a
// cluster, register budgets that change as a kernel runs.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/ptx.cuh"

namespace bitsparse::kernels {

// Barriers and clusters -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the barrier of the same name in another thread block of the cluster.
__device__ __forceinline__ void arrive_at(std::uint32_t barrier, std::uint32_t rank) {
  asm volatile(
      "{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [r];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// For one that has phase after phase. (Not for one that is used once: a parity that is no immediate gives other code.)
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra WAIT; DONE: }" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}
// By all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Copies --------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_box(std::uint32_t to, const CUtensorMap* map, int x, int y,
                                         std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
// To the same place in all thread blocks that `ranks` has a bit for, whose barriers are told.
__device__ __forceinline__ void load_box_to(std::uint16_t ranks, std::uint32_t to, const CUtensorMap* map, int x, int y,
                                            std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(ranks)
      : "memory");
}

__device__ __forceinline__ void prefetch_to_l2(const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Shared memory -------------------------------------------------------------------------------------------------------

// Four words, 16 bytes apart.
__device__ __forceinline__ void load_shared(std::uint32_t address, std::uint32_t (&x)[4]) {
  asm volatile(
      "ld.shared.u32 %0, [%4]; ld.shared.u32 %1, [%4+16]; ld.shared.u32 %2, [%4+32]; ld.shared.u32 %3, [%4+48];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
      : "r"(address));
}
// Four 8 x 8 matrices of 16-bit elements; lane l has the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(std::uint32_t address, const std::uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3]));
}

__device__ __forceinline__ std::uint32_t pack_bfloat16(float2 pair) {
  std::uint32_t x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(pair.y), "f"(pair.x));
  return x;
}
__device__ __forceinline__ float2 unpack_bfloat16(std::uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

// Registers -----------------------------------------------------------------------------------------------------------

template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Products ------------------------------------------------------------------------------------------------------------

// A matrix of rows of 128 bytes, swizzled in groups of eight rows. Transposed ones are in panels of that width.
__device__ __forceinline__ std::uint64_t matrix_at(std::uint32_t address, std::uint32_t panel_bytes = 16) {
  constexpr std::uint64_t kGroupBytes = 1024, kSwizzle128 = 1;
  return (address & 0x3ffff) >> 4 | std::uint64_t{panel_bytes >> 4} << 16 | kGroupBytes >> 4 << 32 | kSwizzle128 << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Sums become values here: the compiler takes them for such as soon as their products are asked for.
__device__ __forceinline__ void settle(float (&sum)[128]) {
#pragma unroll
  for (float& value : sum) asm volatile("" : "+f"(value)::"memory");
}

// sum (+)= a bᵀ of bfloat16 matrices a (64 x 16) and b (128 or 256 x 16, in memory or as a result of transposing), by a
// warpgroup. The sums are the instruction's first 64 or 128 operands.
// clang-format off
#define BITSPARSE_NAMES_0_63 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BITSPARSE_NAMES_64_127 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define BITSPARSE_SUMS_8(i) \
  "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), \
  "+f"(sum[i + 4]), "+f"(sum[i + 5]), "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define BITSPARSE_SUMS_64(i) \
  BITSPARSE_SUMS_8(i), BITSPARSE_SUMS_8(i + 8), BITSPARSE_SUMS_8(i + 16), BITSPARSE_SUMS_8(i + 24), \
  BITSPARSE_SUMS_8(i + 32), BITSPARSE_SUMS_8(i + 40), BITSPARSE_SUMS_8(i + 48), BITSPARSE_SUMS_8(i + 56)
// clang-format on
template <bool Transposed>
__device__ __forceinline__ void multiply(float (&sum)[64], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{" BITSPARSE_NAMES_0_63 "}, %64, %65, p, 1, 1, 0, %67;}"
      : BITSPARSE_SUMS_64(0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(Transposed ? 1 : 0));
}
template <bool Transposed>
__device__ __forceinline__ void multiply(float (&sum)[128], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{" BITSPARSE_NAMES_0_63 ", " BITSPARSE_NAMES_64_127 "}, %128, %129, p, 1, 1, 0, %131;}"
      : BITSPARSE_SUMS_64(0), BITSPARSE_SUMS_64(64)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(Transposed ? 1 : 0));
}
#undef BITSPARSE_NAMES_0_63
#undef BITSPARSE_NAMES_64_127
#undef BITSPARSE_SUMS_8
#undef BITSPARSE_SUMS_64

}  // namespace bitsparse::kernels
