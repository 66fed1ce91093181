// Single instructions that CUDA C++ has no name for, with what older architectures do instead.
#pragma once

#include <cstdint>

namespace bitsparse::kernels {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// A thread block's dynamic shared memory. Its address takes three instructions, one of them slow, and compilers repeat
// them at each use unless they can't know what it is.
__device__ __forceinline__ std::uint32_t* dynamic_shared() {
  extern __shared__ __align__(128) std::uint32_t memory[];
  std::uint32_t address = shared_address(memory);
  asm volatile("" : "+r"(address));
  return static_cast<std::uint32_t*>(__cvta_shared_to_generic(address));
}

// Stores the low `Bytes` bytes of `x` if `condition`. Predicated, not branched around.
template <int Bytes>
__device__ __forceinline__ void store_shared_if(bool condition, void* to, std::uint32_t x) {
#define BITSPARSE_STORE_IF(store)                                                                                \
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p " store " [%0], %1;}" ::"r"(shared_address(to)), "r"(x), \
               "r"(static_cast<std::uint32_t>(condition))                                                        \
               : "memory")
  static_assert(Bytes == 2 || Bytes == 4);
  if constexpr (Bytes == 2) BITSPARSE_STORE_IF("st.shared.u16");
  if constexpr (Bytes == 4) BITSPARSE_STORE_IF("st.shared.u32");
#undef BITSPARSE_STORE_IF
}

// Input is read once: keep it out of L1. Not `.nc`, as compress may write its output over its input.
__device__ __forceinline__ uint4 load_streaming(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// A value that another thread block may be writing now. No acquire: what is read here is only used as an address to
// write to.
__device__ __forceinline__ std::uint64_t load_relaxed(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ std::uint32_t load_relaxed(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Shift left that gives 0 for counts of 32 and more, as PTX defines it (C++ does not).
__device__ __forceinline__ std::uint32_t shift_left(std::uint32_t x, std::uint32_t count) {
  std::uint32_t r;
  asm("shl.b32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(count));
  return r;
}

__device__ __forceinline__ std::uint32_t shift_right(std::uint32_t x, std::uint32_t count) {
  std::uint32_t r;
  asm("shr.u32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(count));
  return r;
}

// Four bytes of `b` (4..7) and `a` (0..3), chosen by the nibbles of the selector's low half; its high half is not
// looked at. Nibbles from 8 on repeat the top bit of a byte.
__device__ __forceinline__ std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  std::uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// All bits of every byte whose top bit is set.
__device__ __forceinline__ std::uint32_t spread_top_bits(std::uint32_t x) { return permute_bytes(x, x, 0xba98); }

// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ std::uint32_t warp_inclusive_sum(std::uint32_t x) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1)
    asm volatile("{.reg .pred p; .reg .u32 t; shfl.sync.up.b32 t|p, %0, %1, 0, 0xffffffff; @p add.u32 %0, %0, t;}"
                 : "+r"(x)
                 : "r"(d));
  return x;
}

// The bulk copy engine; only where Tuning::kBulkCopy says that there is one.
__device__ __forceinline__ void bulk_store(void* global, std::uint32_t shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

// Shared memory may be reused once this returns; the kernel's end makes the stores visible.
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Orders this thread's shared-memory stores before bulk copies that read them.
__device__ __forceinline__ void fence_shared_to_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers in shared memory, by their shared addresses.
template <int Arrivals>
__device__ __forceinline__ void barrier_init(std::uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "n"(Arrivals) : "memory");
}

// Of this thread's new barriers: before another thread block of the cluster, or a bulk copy, arrives at one.
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_load(std::uint32_t shared, const void* global, std::uint32_t bytes,
                                          std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// For a barrier that is used once.
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier) {
  asm volatile(
      "{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @p bra DONE; bra WAIT; DONE: }" ::"r"(
          barrier)
      : "memory");
}

}  // namespace bitsparse::kernels
