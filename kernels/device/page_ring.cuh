// Taking pages from a ring and returning them, from any number of kernels on any streams at once.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"
#include "launch.h"

namespace bitsparse::kernels {

// Takes up to `wanted` permits; returns how many. Only who has a permit takes a ticket.
__device__ __forceinline__ std::uint32_t take_permits(PageRing& ring, std::uint32_t wanted) {
  std::uint32_t there = *reinterpret_cast<volatile std::uint32_t*>(&ring.available);
  while (true) {
    const std::uint32_t taken = min(wanted, there);
    if (taken == 0) return 0;
    const std::uint32_t seen = atomicCAS(&ring.available, there, there - taken);
    if (seen == there) return taken;
    there = seen;
  }
}

// The page of a ticket: it is there, or about to be put there by a thread that is running, so the wait ends. No fence:
// the kernels that used the page last had ended before the one that returned it began.
__device__ __forceinline__ std::uint64_t get_page(PageRing& ring, std::uint32_t ticket) {
  auto* slot = reinterpret_cast<unsigned long long*>(&ring.slots[ticket & ring.slot_mask]);
  unsigned long long page;
  while ((page = atomicExch(slot, 0ull)) == kPageMissing) __nanosleep(50);
  return page;
}

// A free page, or kPageMissing if there is none.
__device__ __forceinline__ std::uint64_t pop_page(PageRing& ring) {
  if (take_permits(ring, 1) == 0) return kPageMissing;
  return get_page(ring, atomicAdd(&ring.head, 1u));
}

// Puts a page into the slot of `ticket`; the caller returns the permit afterwards.
__device__ __forceinline__ void put_page(PageRing& ring, std::uint32_t ticket, std::uint64_t page) {
  auto* slot = reinterpret_cast<unsigned long long*>(&ring.slots[ticket & ring.slot_mask]);
  while (atomicCAS(slot, 0ull, static_cast<unsigned long long>(page)) != 0ull) __nanosleep(50);
}

}  // namespace bitsparse::kernels
