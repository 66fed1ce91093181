// Taking pages from a ring and returning them, from any number of kernels on any streams at once.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"
#include "launch.h"

namespace bitsparse::kernels {

// Takes a permit if there is one. Only who has a permit takes a ticket.
__device__ __forceinline__ bool take_permit(PageRing& ring) {
  std::uint32_t there = *reinterpret_cast<volatile std::uint32_t*>(&ring.available);
  while (there != 0) {
    const std::uint32_t seen = atomicCAS(&ring.available, there, there - 1);
    if (seen == there) return true;
    there = seen;
  }
  return false;
}

// A free page, or kPageMissing if there is none. The page of a ticket is there, or about to be put there by a thread
// that is running, so the wait ends. No fence: the kernels that used the page last had ended before the one that
// returned it began.
__device__ __forceinline__ std::uint64_t pop_page(PageRing& ring) {
  if (!take_permit(ring)) return kPageMissing;
  const std::uint32_t ticket = atomicAdd(&ring.head, 1u);
  auto* slot = reinterpret_cast<unsigned long long*>(&ring.slots[ticket & ring.slot_mask]);
  unsigned long long page;
  while ((page = atomicExch(slot, 0ull)) == kPageMissing) __nanosleep(50);
  return page;
}

// Puts a page into the slot of `ticket`; the caller returns the permit afterwards.
__device__ __forceinline__ void put_page(PageRing& ring, std::uint32_t ticket, std::uint64_t page) {
  auto* slot = reinterpret_cast<unsigned long long*>(&ring.slots[ticket & ring.slot_mask]);
  while (atomicCAS(slot, 0ull, static_cast<unsigned long long>(page)) != 0ull) __nanosleep(50);
}

__device__ __forceinline__ void push_page(PageRing& ring, std::uint64_t page) {
  put_page(ring, atomicAdd(&ring.tail, 1u), page);
  __threadfence();
  atomicAdd(&ring.available, 1u);
}

}  // namespace bitsparse::kernels
