#include "cuda/page_memory.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include "cuda/check.h"

namespace bitsparse::cuda {
namespace {

using c10::cuda::CUDAStream;

std::uint32_t slots_for(std::int64_t pages) {
  std::uint32_t slots = 64;
  while (slots < pages) slots *= 2;
  return slots;
}

}  // namespace

void PageMemory::initialise(std::int64_t spill_bytes, CUDAStream stream) {
  std::size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  spill_limit_pages_ = spill_bytes / kPageBytes;
  device_slots_ = slots_for(static_cast<std::int64_t>(total_bytes) / kPageBytes);
  spill_slots_ = slots_for(spill_limit_pages_);
  constexpr std::size_t kHeader = (sizeof(kernels::PagePool) + 255) / 256 * 256;
  const std::size_t slots = std::size_t{device_slots_} + spill_slots_;
  pool_memory_ = c10::cuda::CUDACachingAllocator::get()->allocate(kHeader + sizeof(std::uint64_t) * slots);
  auto* base = static_cast<std::uint8_t*>(pool_memory_.get());
  pool_ = reinterpret_cast<kernels::PagePool*>(base);
  ring_slots_ = reinterpret_cast<std::uint64_t*>(base + kHeader);
  reset_pool(stream);
}

void PageMemory::reset_pool(CUDAStream stream) {
  check(kernels::init_pool(pool_, ring_slots_, device_slots_, ring_slots_ + device_slots_, spill_slots_, kPageShift,
                           stream),
        "setting up an arena");
}

void PageMemory::record_growth(CUDAStream stream) {
  growth_stream_ = stream;
  growth_event_.record(stream);
}

void PageMemory::grow(std::int64_t pages, CUDAStream stream) {
  wait_for_growth(stream);  // who waits for this growth then has all earlier ones
  // The memory may still be in use by earlier work of this stream, so the kernel that offers its pages goes there too.
  c10::DataPtr slab = c10::cuda::CUDACachingAllocator::get()->allocate(pages * kPageBytes);
  check(kernels::push_pages(pool_, reinterpret_cast<std::uint64_t>(slab.get()), static_cast<std::uint32_t>(pages), 0,
                            stream),
        "growing an arena");
  slabs_.push_back(std::move(slab));
  capacity_pages_ += pages;
  record_growth(stream);
}

void PageMemory::wait_for_growth(CUDAStream stream) {
  if (growth_stream_ && *growth_stream_ != stream) growth_event_.block(stream);
}

void PageMemory::add_spill_region(CUDAStream stream) {
  if (spill_ || spill_limit_pages_ == 0) return;
  spill_ = spill_region_.pin(spill_limit_pages_ * kPageBytes);
  if (!spill_) {
    spill_limit_pages_ = 0;  // not to try again
    return;
  }
  spill_pages_ = spill_limit_pages_;
  wait_for_growth(stream);
  offer_spill_pages(stream);
  record_growth(stream);
}

void PageMemory::offer_spill_pages(CUDAStream stream) {
  if (!spill_) return;
  check(kernels::push_pages(pool_, reinterpret_cast<std::uint64_t>(spill_), static_cast<std::uint32_t>(spill_pages_),
                            kernels::kPageSpilled, stream),
        "adding a spill region");
}

void PageMemory::rebuild(std::int64_t pages, CUDAStream stream) {
  slabs_.clear();
  capacity_pages_ = 0;
  reset_pool(stream);
  offer_spill_pages(stream);
  check(cudaStreamSynchronize(stream), "trimming an arena");  // whatever happens to the growth
  if (pages == 0) return;
  grow(pages, stream);
  check(cudaStreamSynchronize(stream), "trimming an arena");
}

}  // namespace bitsparse::cuda
