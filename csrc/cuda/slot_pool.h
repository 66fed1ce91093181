// Lease slots that are free, by size.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "cuda/lease_slot.h"

namespace bitsparse::cuda {

class SlotPool {
 public:
  SlotPool() = default;
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // A free slot with at least these many entries, its record cleared. A new one is zeroed by work on `stream`.
  LeaseSlot* take(const SlotClass& at_least, c10::cuda::CUDAStream stream);
  // Only when the device is done with the slot.
  void give_back(LeaseSlot* slot);

 private:
  volatile kernels::LeaseRecord* new_record();

  std::deque<LeaseSlot> slots_;  // addresses stay valid
  std::map<SlotClass, std::vector<LeaseSlot*>> free_;
  std::vector<void*> record_chunks_;  // host-mapped
  std::size_t records_used_ = 0;
};

}  // namespace bitsparse::cuda
