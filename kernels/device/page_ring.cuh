// Taking pages from a ring and returning them, from any number of kernels on any streams at once.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"
#include "launch.h"

namespace bitsparse::kernels {

// A free page, or kPageMissing if there is none. Only a thread that got a permit takes a ticket, so every ticket's page is there or
// about to be put there by a thread that is running: the wait ends.
__device__ __forceinline__ std::uint64_t pop_page(PageRing& ring) {
  std::uint32_t permits = *reinterpret_cast<volatile std::uint32_t*>(&ring.available);
  while (true) {
    if (permits == 0) return kPageMissing;
    const std::uint32_t seen = atomicCAS(&ring.available, permits, permits - 1);
    if (seen == permits) break;
    permits = seen;
  }
  const std::uint32_t ticket = atomicAdd(&ring.head, 1u);
  auto* slot = reinterpret_cast<unsigned long long*>(&ring.slots[ticket & ring.slot_mask]);
  unsigned long long page;
  while ((page = atomicExch(slot, 0ull)) == kPageMissing) __nanosleep(50);
  __threadfence();  // what the page's last user did happened before
  return page;
}

// Puts a page into the slot of `ticket`; the caller returns the permit afterwards.
__device__ __forceinline__ void put_page(PageRing& ring, std::uint32_t ticket, std::uint64_t page) {
  auto* slot = reinterpret_cast<unsigned long long*>(&ring.slots[ticket & ring.slot_mask]);
  while (atomicCAS(slot, 0ull, static_cast<unsigned long long>(page)) != 0ull) __nanosleep(50);
}

}  // namespace bitsparse::kernels
