#include "cuda/slot_pool.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include "cuda/check.h"

namespace bitsparse::cuda {
namespace {

constexpr std::size_t kRecordsPerChunk = 1024;

// Few classes, so that slots of tensors of many shapes are used again: powers of two.
std::int64_t round_up(std::int64_t n) {
  std::int64_t r = 16;
  while (r < n) r *= 2;
  return r;
}

}  // namespace

SlotPool::~SlotPool() {
  for (void* chunk : record_chunks_) cudaFreeHost(chunk);
}

volatile kernels::LeaseRecord* SlotPool::new_record() {
  if (records_used_ == record_chunks_.size() * kRecordsPerChunk) {
    void* chunk = nullptr;
    check(cudaHostAlloc(&chunk, kRecordsPerChunk * sizeof(kernels::LeaseRecord),
                        cudaHostAllocMapped | cudaHostAllocPortable),
          "allocating host-mapped records");
    record_chunks_.push_back(chunk);
  }
  return static_cast<kernels::LeaseRecord*>(record_chunks_.back()) + records_used_++ % kRecordsPerChunk;
}

LeaseSlot* SlotPool::take(const SlotClass& at_least, c10::cuda::CUDAStream stream) {
  const SlotClass size{round_up(at_least.pages), round_up(at_least.tiles)};
  std::vector<LeaseSlot*>& free = free_[size];
  LeaseSlot* slot;
  if (free.empty()) {
    LeaseSlot fresh{};
    fresh.size = size;
    fresh.memory = c10::cuda::CUDACachingAllocator::get()->allocate(LeaseSlot::bytes(size));
    fresh.record = new_record();
    check(cudaMemsetAsync(fresh.memory.get(), 0, LeaseSlot::zeroed_bytes(size), stream), "clearing a lease slot");
    slots_.push_back(std::move(fresh));
    slot = &slots_.back();
  } else {
    slot = free.back();
    free.pop_back();
  }
  slot->record->units = 0;
  slot->record->finished = 0;
  slot->record->released = 0;
  slot->record->lost_tiles = 0;
  slot->record->spilled_pages = 0;
  slot->record->high_water = 0;
  return slot;
}

void SlotPool::give_back(LeaseSlot* slot) {
  slot->home.reset();
  slot->readers.clear();
  slot->finished = slot->ending = slot->release_enqueued = false;
  slot->units = slot->dense_bytes = 0;
  slot->capture = 0;
  slot->prefill = 0;
  slot->id = 0;
  free_[slot->size].push_back(slot);
}

}  // namespace bitsparse::cuda
