#include "cuda/slot_pool.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include "cuda/check.h"

namespace bitsparse::cuda {
namespace {

std::int64_t power_of_two(std::int64_t at_least) {
  std::int64_t n = 16;
  while (n < at_least) n *= 2;
  return n;
}

}  // namespace

SlotClass SlotPool::class_of(std::int64_t pages, std::int64_t tiles) {
  return {power_of_two(pages), power_of_two(tiles)};
}

LeaseSlot* SlotPool::take(const SlotClass& size, c10::cuda::CUDAStream stream) {
  std::vector<LeaseSlot*>& free = free_[size];
  if (free.empty()) {
    LeaseSlot fresh{size, c10::cuda::CUDACachingAllocator::get()->allocate(LeaseSlot::bytes(size))};
    check(cudaMemsetAsync(fresh.memory.get(), 0, LeaseSlot::zeroed_bytes(size), stream), "clearing a lease slot");
    slots_.push_back(std::move(fresh));
    return &slots_.back();
  }
  LeaseSlot* slot = free.back();
  free.pop_back();
  return slot;
}

}  // namespace bitsparse::cuda
