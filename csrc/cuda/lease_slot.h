// The device memory behind one lease: a handle, its control, the page table and the tile table, and a record that
// kernels write for the host to read. Slots are kept and used again; between leases the control and the page table are
// zero (release sees to it).
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <utility>
#include <vector>

#include "launch.h"
#include "lease.h"
#include "sizing.h"

namespace bitsparse::cuda {

struct SlotClass {
  std::int64_t pages;  // entries of the page table
  std::int64_t tiles;
  bool operator<(const SlotClass& other) const { return std::pair(pages, tiles) < std::pair(other.pages, other.tiles); }
};

struct LeaseSlot {
  SlotClass size;
  c10::DataPtr memory;  // handle | control | page table | tile table
  volatile kernels::LeaseRecord* record;

  // Of the lease that has the slot now.
  std::int64_t dense_bytes = 0;
  Sizing::LeaseId id = 0;
  std::optional<c10::cuda::CUDAStream> home;  // where it was compressed and where it will be released
  std::vector<std::pair<c10::cuda::CUDAStream, at::cuda::CUDAEvent>> readers;  // other streams, and their last read
  bool finished = false;                                                       // size known to the host
  bool ending = false;                                                         // its owner is gone
  bool release_enqueued = false;
  std::int64_t units = 0;
  std::uint32_t prefill = 0;       // pages that compress takes at once
  unsigned long long capture = 0;  // the graph capture that owns the slot, 0: none

  static constexpr std::int64_t kControlOffset = 64;
  static constexpr std::int64_t kPagesOffset = 128;
  std::int64_t tiles_offset() const { return kPagesOffset + 8 * size.pages; }
  static std::int64_t bytes(const SlotClass& size) { return kPagesOffset + 8 * (size.pages + size.tiles); }
  static std::int64_t zeroed_bytes(const SlotClass& size) { return kPagesOffset + 8 * size.pages; }

  std::uint8_t* base() const { return static_cast<std::uint8_t*>(memory.get()); }
  kernels::BlobStore store(kernels::PagePool* pool, std::uint32_t page_shift) const {
    return {reinterpret_cast<std::uint64_t*>(base() + tiles_offset()),
            reinterpret_cast<kernels::LeaseControl*>(base() + kControlOffset),
            reinterpret_cast<std::uint64_t*>(base() + kPagesOffset),
            nullptr,
            pool,
            const_cast<kernels::LeaseRecord*>(record),
            page_shift,
            prefill};
  }
};

}  // namespace bitsparse::cuda
