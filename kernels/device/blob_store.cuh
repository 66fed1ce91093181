// Where a tile's blob goes and where it is found again.
//
// A lease has an address space of its own, counted in units: a tile reserves the next units with one atomic, and a page table maps the
// space to pages of the arena. The tile that holds a page's first unit takes the page from the pool and publishes it; tiles further
// into the page wait for that entry. The publisher is a running thread block, so the wait ends. A blob may lie across two pages.
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

// Takes a page for the lease and publishes it in the page table. Rare: kept out of line, its registers out of the kernel's budget.
inline __device__ __noinline__ std::uint64_t take_page(PagePool* pool, LeaseRecord* record, std::uint64_t* page_table_entry) {
  std::uint64_t page = pop_page(pool->device_pages);
  if (page == kPageMissing) {
    page = pop_page(pool->spill_pages);
    if (page != kPageMissing && record) atomicAdd_system(&record->spilled_pages, 1u);
  }
  if (page == kPageMissing)
    page = kPageLost;
  else
    atomicMax(&pool->high_water, atomicAdd(&pool->in_use, 1u) + 1);
  store_release(page_table_entry, page);
  return page;
}

__device__ __forceinline__ std::uint64_t wait_page(const BlobStore& store, std::uint64_t index) {
  std::uint64_t page;
  while ((page = load_acquire(&store.pages[index])) == kPageMissing) __nanosleep(20);
  return page;
}

// One atomic a tile. The tile that makes the count complete knows the final size and tells the host.
__device__ __forceinline__ std::uint64_t reserve_units(const BlobStore& store, std::uint32_t units, std::uint32_t tiles) {
  const unsigned long long before = atomicAdd(store.cursor, units | 1ull << kCursorTileShift);
  const std::uint64_t offset = before & ((1ull << kCursorTileShift) - 1);
  if (store.record && (before >> kCursorTileShift) + 1 == tiles) {
    volatile LeaseRecord* record = store.record;
    record->units = offset + units;
    record->high_water = *reinterpret_cast<volatile std::uint32_t*>(&store.pool->high_water);
    __threadfence_system();
    record->finished = 1;
  }
  return offset;
}

// Called by one thread of the tile.
__device__ __forceinline__ Placement place_blob(const BlobStore& store, std::uint64_t offset, std::uint32_t units) {
  if (!store.pages) return {store.payload + offset * kUnitBytes, nullptr, units, false};
  const std::uint64_t index = offset >> store.page_shift;
  const std::uint32_t page_units = 1u << store.page_shift;
  const std::uint32_t within = static_cast<std::uint32_t>(offset) & (page_units - 1);
  const bool crosses = within + units > page_units;
  const std::uint64_t next = crosses ? take_page(store.pool, store.record, &store.pages[index + 1]) : kPageMissing;
  const std::uint64_t page = within == 0 ? take_page(store.pool, store.record, &store.pages[index]) : wait_page(store, index);
  const bool lost = page == kPageLost || next == kPageLost;
  if (lost && store.record) atomicAdd_system(&store.record->lost_tiles, 1u);
  return {page_address(page) + within * kUnitBytes, page_address(next), crosses ? page_units - within : units, lost};
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
