// Where a tile's blob goes and where it is found again.
//
// A lease has an address space of its own, counted in units: a tile reserves the next units with one atomic, and a page
// table maps the space to pages of the arena. A blob may lie across two pages.
//
// A compress kernel finds the pages that the last one on the same memory left: a tile usually looks its page up and
// goes on. Where there is none, the tile that holds the page's first unit takes one and publishes it, and tiles further
// into the page wait for the entry. Whoever publishes is a running thread block, so waits end. The block that reserves
// last returns the pages that are not needed this time.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "bitsparse/format.h"
#include "device/page_ring.cuh"
#include "device/ptx.cuh"
#include "launch.h"

// What is rare is kept out of line, its registers out of the kernel's budget.
#ifndef BITSPARSE_RARE
#define BITSPARSE_RARE inline __noinline__
#endif

namespace bitsparse::kernels {

// A blob in at most two pieces.
struct Placement {
  std::uint8_t* first;
  std::uint8_t* second;
  std::uint32_t first_units;  // the rest is in the second piece
  bool lost;
};

// A tile's range of the lease's units.
struct Reservation {
  std::uint64_t offset;
  std::uint32_t generation;  // of this launch, as in page table entries
  bool last;                 // all tiles have their ranges now
};

__device__ __forceinline__ std::uint8_t* page_address(std::uint64_t entry) {
  return reinterpret_cast<std::uint8_t*>(entry & ~kPageFlagMask);
}

// A page of device memory: in use by every launch that finds it, and final within a launch.
__device__ __forceinline__ bool is_plain_page(std::uint64_t entry) {
  return entry != kPageMissing && (entry & (kPageLost | kPageSpilled)) == 0;
}

__device__ __forceinline__ bool is_settled(std::uint64_t entry, std::uint32_t generation) {
  return is_plain_page(entry) || (entry != kPageMissing && entry >> kGenerationShift == generation);
}

__device__ __forceinline__ std::uint64_t pages_of(std::uint64_t units, std::uint32_t page_shift) {
  return (units + (1ull << page_shift) - 1) >> page_shift;
}

// Shows the host a count that other threads may be changing. Counts are kept in device memory, as atomics are none in
// host memory without hostNativeAtomicSupported; and of several threads' stores the last must be of the last count.
inline __device__ void show_count(const std::uint32_t* count, volatile std::uint32_t* to_host) {
  std::uint32_t shown, now = load_relaxed(count);
  do {
    *to_host = shown = now;
    __threadfence_system();
    now = load_relaxed(count);
  } while (now != shown);
}

inline __device__ void count_lost_tile(const BlobStore& store) {
  if (!store.record) return;
  atomicAdd(&store.control->lost_tiles, 1u);
  show_count(&store.control->lost_tiles, &store.record->lost_tiles);
}

// `change`: 0 if the lease has the page from before.
inline __device__ void count_spilled_page(const BlobStore& store, int change) {
  if (change) atomicAdd(&store.control->spilled_pages, static_cast<std::uint32_t>(change));
  if (!store.record) return;
  if (change >= 0) static_cast<volatile LeaseRecord*>(store.record)->has_spilled = 1;
  show_count(&store.control->spilled_pages, &store.record->spilled_pages);
}

// By the tile that holds the page's first unit, for an entry that is missing or left from an earlier launch as lost or
// spilled: takes a page, or keeps the spilled one if there is no better, and publishes it.
inline __device__ std::uint64_t take_page(const BlobStore& store, std::uint64_t index, std::uint32_t generation) {
  PagePool& pool = *store.pool;
  std::uint64_t* const entry = &store.pages[index];
  const std::uint64_t held = load_relaxed(entry);
  const bool holds_spilled = held & kPageSpilled;
  std::uint64_t page = pop_page(pool.device_pages);
  bool is_new = page != kPageMissing;
  if (is_new) {
    if (holds_spilled) {
      push_page(pool.spill_pages, reinterpret_cast<std::uint64_t>(page_address(held)) | kPageSpilled);
      is_new = false;
      count_spilled_page(store, -1);
    }
  } else {
    if (holds_spilled) {
      page = reinterpret_cast<std::uint64_t>(page_address(held)) | kPageSpilled;
    } else {
      page = pop_page(pool.spill_pages);
      is_new = page != kPageMissing;
    }
    if (page == kPageMissing)
      page = kPageLost;
    else
      count_spilled_page(store, is_new);
    page |= static_cast<std::uint64_t>(generation) << kGenerationShift;
  }
  if (is_new) atomicMax(&pool.high_water, atomicAdd(&pool.in_use, 1u) + 1);
  store_relaxed(entry, page);
  return page;
}

BITSPARSE_RARE __device__ std::uint64_t settle_page(const BlobStore& store, std::uint64_t index,
                                                    std::uint32_t generation, bool first_in_page) {
  if (first_in_page) return take_page(store, index, generation);
  std::uint64_t entry;
  while (!is_settled(entry = load_relaxed(&store.pages[index]), generation)) __nanosleep(20);
  return entry;
}

// One load that L1 may answer: what it remembers of a page's entry is right, and any other entry is looked at again.
__device__ __forceinline__ std::uint64_t find_page(const BlobStore& store, std::uint64_t index,
                                                   std::uint32_t generation, bool first_in_page) {
  const std::uint64_t entry = __ldca(reinterpret_cast<const unsigned long long*>(&store.pages[index]));
  return is_plain_page(entry) ? entry : settle_page(store, index, generation, first_in_page);
}

// By all of a group of threads, one group a thread block: gives the pages of the entries [begin, end) back and clears
// the entries.
template <class Group>
BITSPARSE_RARE __device__ void return_pages(const Group& group, const BlobStore& store, std::uint64_t begin,
                                            std::uint64_t end) {
  PagePool* const pool = store.pool;
  std::uint64_t* const table = store.pages;
  __shared__ std::uint32_t device_count, spill_count, device_ticket, spill_ticket;
  if (group.thread_rank() == 0) device_count = spill_count = 0;
  group.sync();
  for (std::uint64_t i = begin + group.thread_rank(); i < end; i += group.size()) {
    if (is_plain_page(table[i])) atomicAdd(&device_count, 1u);
    if (table[i] & kPageSpilled) atomicAdd(&spill_count, 1u);
  }
  group.sync();
  if (group.thread_rank() == 0) {
    device_ticket = atomicAdd(&pool->device_pages.tail, device_count);
    spill_ticket = atomicAdd(&pool->spill_pages.tail, spill_count);
  }
  group.sync();
  for (std::uint64_t i = begin + group.thread_rank(); i < end; i += group.size()) {
    const std::uint64_t entry = table[i];
    table[i] = kPageMissing;
    const auto address = reinterpret_cast<std::uint64_t>(page_address(entry));
    if (is_plain_page(entry)) put_page(pool->device_pages, atomicAdd(&device_ticket, 1u), address);
    if (entry & kPageSpilled) put_page(pool->spill_pages, atomicAdd(&spill_ticket, 1u), address | kPageSpilled);
  }
  __threadfence();
  group.sync();
  if (group.thread_rank() == 0) {
    atomicSub(&pool->in_use, device_count + spill_count);
    if (device_count) atomicAdd(&pool->device_pages.available, device_count);
    if (spill_count) atomicAdd(&pool->spill_pages.available, spill_count);
    if (spill_count) count_spilled_page(store, -static_cast<int>(spill_count));
  }
}

// Writes what the host waits for, then the flag that says so. By one thread.
__device__ __forceinline__ void set_record_flag(const BlobStore& store, std::uint32_t LeaseRecord::*flag) {
  volatile LeaseRecord* record = store.record;
  record->high_water = *reinterpret_cast<volatile std::uint32_t*>(&store.pool->high_water);
  __threadfence_system();
  record->*flag = 1;
}

// By one thread of the tile: one atomic, whose result is best left alone until other work is done. At most 2^24 tiles.
__device__ __forceinline__ std::uint64_t reserve_units(const BlobStore& store, std::uint32_t units) {
  return atomicAdd(&store.control->cursor, units | 1ull << kCursorTileShift);
}

__device__ __forceinline__ Reservation reservation_of(std::uint64_t ticket, std::uint32_t tiles) {
  constexpr int kTileBits = kGenerationShift - kCursorTileShift;
  const auto tile = static_cast<std::uint32_t>(ticket >> kCursorTileShift) & ((1u << kTileBits) - 1);
  return {ticket & ((1ull << kCursorTileShift) - 1), static_cast<std::uint32_t>(ticket >> kGenerationShift),
          tile + 1 == tiles};
}

// By all of a group of threads that reserved last: makes the control ready for the next launch, returns the pages
// beyond those that this one uses, and tells the host the size.
template <class Group>
BITSPARSE_RARE __device__ void finish_lease(const Group& group, const BlobStore& store, std::uint64_t total_units) {
  LeaseControl& control = *store.control;
  const std::uint64_t held = pages_of(control.units, store.page_shift);
  group.sync();  // everyone has read it
  if (group.thread_rank() == 0) {
    const unsigned long long cursor = *static_cast<volatile unsigned long long*>(&control.cursor);
    control.cursor = ((cursor >> kGenerationShift) + 1) << kGenerationShift;
  }
  if (!store.pages) return;
  const std::uint64_t used = pages_of(total_units, store.page_shift);
  if (used < held) return_pages(group, store, used, held);
  if (group.thread_rank() == 0) {
    control.units = total_units;
    if (store.record) {
      static_cast<volatile LeaseRecord*>(store.record)->units = total_units;
      set_record_flag(store, &LeaseRecord::finished);
    }
  }
}

// By one thread of tile `tile`: finds the blob's pages and writes the tile's entry.
__device__ __forceinline__ Placement place_blob(const BlobStore& store, std::uint32_t tile,
                                                const Reservation& reservation, std::uint32_t units,
                                                std::uint32_t kept) {
  const std::uint64_t offset = reservation.offset;
  if (!store.pages) {
    store.tiles[tile] = make_entry(offset, units, kept);
    return {store.payload + offset * kUnitBytes, nullptr, units, false};
  }
  const std::uint64_t index = offset >> store.page_shift;
  const std::uint32_t page_units = 1u << store.page_shift;
  const std::uint32_t within = static_cast<std::uint32_t>(offset) & (page_units - 1);
  const bool crosses = within + units > page_units;
  // In this order: others may wait for the next page, and nobody should for two.
  const std::uint64_t next = crosses ? find_page(store, index + 1, reservation.generation, true) : kPageMissing;
  const std::uint64_t page = find_page(store, index, reservation.generation, within == 0);
  const bool lost = (page | next) & kPageLost;
  if (lost) count_lost_tile(store);
  std::uint8_t* const first = page_address(page) + within * kUnitBytes;
  const std::uint64_t at =
      crosses || lost ? offset | kLeaseByOffset : reinterpret_cast<std::uint64_t>(first) / kUnitBytes;
  store.tiles[tile] = at | static_cast<std::uint64_t>(units) << kLeaseSizeShift | (lost ? kEntryLost : 0);
  return {first, page_address(next), crosses ? page_units - within : units, lost};
}

// Had the arena no room for the blob?
__device__ __forceinline__ bool is_lost(const BlobStore& store, std::uint64_t entry) {
  return store.pages && entry & kEntryLost;
}

// Where a placed blob is, and its size in units; the page table is complete by now.
__device__ __forceinline__ Placement find_blob(const BlobStore& store, std::uint64_t entry, std::uint32_t& units) {
  if (!store.pages) {
    units = entry_size(entry);
    return {store.payload + entry_offset(entry) * kUnitBytes, nullptr, units, false};
  }
  const std::uint64_t at = entry & ((1ull << kLeaseSizeShift) - 1);
  units = static_cast<std::uint32_t>(entry >> kLeaseSizeShift) & ((1u << kEntrySizeBits) - 1);
  const bool lost = is_lost(store, entry);
  if (!(entry & kLeaseByOffset)) return {reinterpret_cast<std::uint8_t*>(at * kUnitBytes), nullptr, units, lost};
  const std::uint64_t index = at >> store.page_shift;
  const std::uint32_t page_units = 1u << store.page_shift;
  const std::uint32_t within = static_cast<std::uint32_t>(at) & (page_units - 1);
  const std::uint64_t page = __ldg(reinterpret_cast<const unsigned long long*>(&store.pages[index]));
  const std::uint64_t next = __ldg(reinterpret_cast<const unsigned long long*>(&store.pages[index + 1]));
  return {page_address(page) + within * kUnitBytes, page_address(next), page_units - within, lost};
}

}  // namespace bitsparse::kernels
