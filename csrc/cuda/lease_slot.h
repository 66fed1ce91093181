// The device memory behind one lease: a handle, its control, the page table and the tile table. Slots are kept and used
// again. A slot that holds no pages has an all-zero control and page table; a slot whose lease has ended may go on
// holding its pages for the next one.
#pragma once

#include <c10/core/Allocator.h>

#include <utility>

#include "launch.h"

namespace bitsparse::cuda {

struct SlotClass {
  std::int64_t pages;  // entries of the page table
  std::int64_t tiles;
  bool operator<(const SlotClass& other) const { return std::pair(pages, tiles) < std::pair(other.pages, other.tiles); }
  bool operator==(const SlotClass& other) const { return pages == other.pages && tiles == other.tiles; }
};

struct LeaseSlot {
  SlotClass size;
  c10::DataPtr memory;  // handle | control | page table | tile table

  static constexpr std::int64_t kControlOffset = 64;
  static constexpr std::int64_t kPagesOffset = 128;
  std::int64_t tiles_offset() const { return kPagesOffset + 8 * size.pages; }
  static std::int64_t bytes(const SlotClass& size) { return kPagesOffset + 8 * (size.pages + size.tiles); }
  static std::int64_t zeroed_bytes(const SlotClass& size) { return kPagesOffset + 8 * size.pages; }

  std::uint8_t* base() const { return static_cast<std::uint8_t*>(memory.get()); }
  kernels::BlobStore store(kernels::PagePool* pool, std::uint32_t page_shift, volatile kernels::LeaseRecord* record,
                           std::int64_t columns = 0) const {
    return {reinterpret_cast<std::uint64_t*>(base() + tiles_offset()),
            reinterpret_cast<kernels::LeaseControl*>(base() + kControlOffset),
            reinterpret_cast<std::uint64_t*>(base() + kPagesOffset),
            nullptr,
            pool,
            const_cast<kernels::LeaseRecord*>(record),
            page_shift,
            static_cast<std::uint32_t>(columns)};
  }
};

}  // namespace bitsparse::cuda
