// The memory of an arena's pages: slabs from PyTorch's allocator, a pinned spill region, and the device-side pool that
// hands pages out.
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bitsparse/format.h"
#include "cuda/spill_region.h"
#include "launch.h"

namespace bitsparse::cuda {

// 32768 units: 512 KiB. Smaller pages waste less of a lease's last one; larger ones keep the part of the page table
// that a multiprocessor needs in its L1 (docs/performance.md).
constexpr std::uint32_t kPageShift = 15;
constexpr std::int64_t kPageUnits = std::int64_t{1} << kPageShift;
constexpr std::int64_t kPageBytes = kPageUnits * kUnitBytes;

constexpr std::int64_t pages_of_units(std::int64_t units) { return (units + kPageUnits - 1) / kPageUnits; }
constexpr std::int64_t pages_of_bytes(std::int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes; }

// Not thread-safe; the arena's lock protects it. Work goes to the stream given, which must not be capturing.
class PageMemory {
 public:
  PageMemory() = default;
  PageMemory(const PageMemory&) = delete;
  PageMemory& operator=(const PageMemory&) = delete;

  // Creates the pool, empty, on the current device. `spill_bytes` bounds the later spill region.
  void initialise(std::int64_t spill_bytes, c10::cuda::CUDAStream stream);
  // Adds pages without waiting; later work of other streams must wait_for_growth. Throws c10::OutOfMemoryError.
  void grow(std::int64_t pages, c10::cuda::CUDAStream stream);
  void wait_for_growth(c10::cuda::CUDAStream stream);
  // Has the system begin with the memory of add_spill_region.
  void prepare_spill_region() { spill_region_.prepare(spill_limit_pages_ * kPageBytes); }
  // Pinned host pages, once; none if the system has no memory for them, which is no error.
  void add_spill_region(c10::cuda::CUDAStream stream);
  // Starts again with `pages` device pages in one slab. Nothing on the device may be using a page. Waits. Throws
  // c10::OutOfMemoryError; then there are none.
  void rebuild(std::int64_t pages, c10::cuda::CUDAStream stream);

  kernels::PagePool* pool() const { return pool_; }  // null before initialise
  std::int64_t capacity_pages() const { return capacity_pages_; }
  std::int64_t spill_pages() const { return spill_pages_; }

 private:
  void record_growth(c10::cuda::CUDAStream stream);
  void reset_pool(c10::cuda::CUDAStream stream);
  void offer_spill_pages(c10::cuda::CUDAStream stream);

  c10::DataPtr pool_memory_;  // PagePool, then the slots of its rings
  kernels::PagePool* pool_ = nullptr;
  std::uint64_t* ring_slots_ = nullptr;
  std::uint32_t device_slots_ = 0, spill_slots_ = 0;
  std::vector<c10::DataPtr> slabs_;
  std::int64_t capacity_pages_ = 0;
  std::int64_t spill_limit_pages_ = 0;
  SpillRegion spill_region_;
  void* spill_ = nullptr;  // in it
  std::int64_t spill_pages_ = 0;
  std::optional<c10::cuda::CUDAStream> growth_stream_;
  at::cuda::CUDAEvent growth_event_;
};

}  // namespace bitsparse::cuda
