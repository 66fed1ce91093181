// Where a tile's blob goes and where it is found again.
//
// A lease has an address space of its own, counted in units: a tile reserves the next units with one atomic, and a page
// table maps the space to pages of the arena. A blob may lie across two pages.
//
// Pages come in two ways. The first thread block takes as many as the last tensor of this kind needed, in parallel, and
// the block that reserves last returns what is too much. Beyond those, the tile that holds a page's first unit takes
// the page and publishes it, and tiles further into the page wait for the entry. Whoever publishes is a running thread
// block, so waits end.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/page_ring.cuh"
#include "device/ptx.cuh"
#include "launch.h"

namespace bitsparse::kernels {

// A blob in at most two pieces.
struct Placement {
  std::uint8_t* first;
  std::uint8_t* second;
  std::uint32_t first_units;  // the rest is in the second piece
  bool lost;
};

__device__ __forceinline__ std::uint8_t* page_address(std::uint64_t page) {
  return reinterpret_cast<std::uint8_t*>(page & ~kPageFlagMask);
}

// Takes a page for the lease and publishes it in the page table. Rare: kept out of line, its registers out of the
// kernel's budget.
inline __device__ __noinline__ std::uint64_t take_page(PagePool* pool, LeaseControl* control, LeaseRecord* record,
                                                       std::uint64_t* page_table_entry) {
  std::uint64_t page = pop_page(pool->device_pages);
  if (page == kPageMissing) {
    control->irregular = 1;
    page = pop_page(pool->spill_pages);
    if (page != kPageMissing && record) atomicAdd_system(&record->spilled_pages, 1u);
  }
  if (page == kPageMissing)
    page = kPageLost;
  else
    atomicMax(&pool->high_water, atomicAdd(&pool->in_use, 1u) + 1);
  store_relaxed(page_table_entry, page);
  return page;
}

// For the tile that holds the page's first unit.
inline __device__ std::uint64_t first_use_of_page(const BlobStore& store, std::uint64_t index) {
  std::uint64_t page = kPageOnDemand;
  if (index < store.prefill)
    while ((page = load_relaxed(&store.pages[index])) == kPageMissing) __nanosleep(20);
  return page == kPageOnDemand ? take_page(store.pool, store.control, store.record, &store.pages[index]) : page;
}

// For tiles further into the page.
inline __device__ std::uint64_t wait_page(const BlobStore& store, std::uint64_t index) {
  // An entry changes until it holds a page and never after, so one that does is right even if L1 is what remembers it.
  std::uint64_t page = *static_cast<const std::uint64_t*>(&store.pages[index]);
  while (page == kPageMissing || page == kPageOnDemand) {
    page = load_relaxed(&store.pages[index]);
    if (page == kPageMissing || page == kPageOnDemand) __nanosleep(20);
  }
  return page;
}

// Block-wide, by the kernel's first thread block: publishes the first `wanted` entries.
inline __device__ __noinline__ void prefill_pages(PagePool* pool, std::uint64_t* page_table, std::uint32_t wanted) {
  __shared__ std::uint32_t count, ticket;
  if (threadIdx.x == 0) {
    count = take_permits(pool->device_pages, wanted);
    ticket = atomicAdd(&pool->device_pages.head, count);
    atomicAdd(&pool->in_use, count);
  }
  __syncthreads();
  for (std::uint32_t i = threadIdx.x; i < wanted; i += blockDim.x)
    store_relaxed(&page_table[i], i < count ? get_page(pool->device_pages, ticket + i) : kPageOnDemand);
}

// Block-wide, by the thread block that reserved last: no tile will ask for a page at or beyond `used`.
inline __device__ __noinline__ void return_unused_pages(PagePool* pool, std::uint64_t* page_table, std::uint64_t used,
                                                        std::uint64_t prefilled) {
  PageRing& ring = pool->device_pages;
  __shared__ std::uint32_t count, ticket;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (std::uint64_t i = used + threadIdx.x; i < prefilled; i += blockDim.x) {
    std::uint64_t page;
    while ((page = load_relaxed(&page_table[i])) == kPageMissing) __nanosleep(50);  // the first thread block is at it
    if (page == kPageOnDemand)
      page_table[i] = kPageMissing;
    else
      atomicAdd(&count, 1u);  // entries of pages come before entries on demand
  }
  __syncthreads();
  if (threadIdx.x == 0) ticket = atomicAdd(&ring.tail, count);
  __syncthreads();
  for (std::uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    put_page(ring, ticket + i, load_relaxed(&page_table[used + i]));
    page_table[used + i] = kPageMissing;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicSub(&pool->in_use, count);
    atomicAdd(&ring.available, count);
  }
}

// One atomic a tile. `last`: all tiles have their places now.
__device__ __forceinline__ std::uint64_t reserve_units(const BlobStore& store, std::uint32_t units, std::uint32_t tiles,
                                                       bool& last) {
  const unsigned long long before = atomicAdd(&store.control->cursor, units | 1ull << kCursorTileShift);
  last = (before >> kCursorTileShift) + 1 == tiles;
  return before & ((1ull << kCursorTileShift) - 1);
}

// Block-wide, by the thread block that reserved last: returns unused pages and tells the host the size.
inline __device__ __noinline__ void finish_lease(const BlobStore& store, std::uint64_t units) {
  if (!store.pages) return;
  const std::uint64_t used = (units + (1ull << store.page_shift) - 1) >> store.page_shift;
  if (used < store.prefill) return_unused_pages(store.pool, store.pages, used, store.prefill);
  if (threadIdx.x == 0) {
    atomicMax(&store.pool->high_water, *reinterpret_cast<volatile std::uint32_t*>(&store.pool->in_use));
    if (store.record) {
      volatile LeaseRecord* record = store.record;
      record->units = units;
      record->high_water = *reinterpret_cast<volatile std::uint32_t*>(&store.pool->high_water);
      __threadfence_system();
      record->finished = 1;
    }
  }
}

// By one thread of the tile: finds the blob's pages and writes the tile's entry. Out of line, as few values of the
// kernel are alive here and its own would count against the kernel's registers.
inline __device__ __noinline__ void place_blob(const BlobStore& store, std::uint64_t offset, std::uint32_t units,
                                               std::uint32_t kept, Placement* where) {
  const std::uint64_t entry = make_entry(offset, units, kept);
  if (!store.pages) {
    *where = {store.payload + offset * kUnitBytes, nullptr, units, false};
    store.tiles[blockIdx.x] = entry;
    return;
  }
  const std::uint64_t index = offset >> store.page_shift;
  const std::uint32_t page_units = 1u << store.page_shift;
  const std::uint32_t within = static_cast<std::uint32_t>(offset) & (page_units - 1);
  const bool crosses = within + units > page_units;
  const std::uint64_t next = crosses ? first_use_of_page(store, index + 1) : kPageMissing;
  const std::uint64_t page = within == 0 ? first_use_of_page(store, index) : wait_page(store, index);
  const bool lost = page == kPageLost || next == kPageLost;
  if (lost && store.record) atomicAdd_system(&store.record->lost_tiles, 1u);
  *where = {page_address(page) + within * kUnitBytes, page_address(next), crosses ? page_units - within : units, lost};
  store.tiles[blockIdx.x] = lost ? entry | kEntryLost : entry;
}

// Where a placed blob is; the page table is complete by now.
__device__ __forceinline__ Placement find_blob(const BlobStore& store, std::uint64_t entry) {
  const std::uint64_t offset = entry_offset(entry);
  const std::uint32_t units = entry_size(entry);
  if (!store.pages) return {store.payload + offset * kUnitBytes, nullptr, units, false};
  const std::uint64_t index = offset >> store.page_shift;
  const std::uint32_t page_units = 1u << store.page_shift;
  const std::uint32_t within = static_cast<std::uint32_t>(offset) & (page_units - 1);
  const bool crosses = within + units > page_units;
  const std::uint64_t page = __ldg(reinterpret_cast<const unsigned long long*>(&store.pages[index]));
  const std::uint64_t next = crosses ? __ldg(reinterpret_cast<const unsigned long long*>(&store.pages[index + 1])) : 0;
  return {page_address(page) + within * kUnitBytes, page_address(next), crosses ? page_units - within : units,
          (entry & kEntryLost) != 0};
}

}  // namespace bitsparse::kernels
