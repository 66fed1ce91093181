// Lease slots that hold no pages and that nothing on the device uses, by size.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <deque>
#include <map>
#include <vector>

#include "cuda/lease_slot.h"

namespace bitsparse::cuda {

class SlotPool {
 public:
  // Few classes, so that slots of tensors of many shapes are used again.
  static SlotClass class_of(std::int64_t pages, std::int64_t tiles);

  // A new slot is zeroed by work on `stream`.
  LeaseSlot* take(const SlotClass& size, c10::cuda::CUDAStream stream);
  void give_back(LeaseSlot* slot) { free_[slot->size].push_back(slot); }

 private:
  std::deque<LeaseSlot> slots_;  // addresses stay valid
  std::map<SlotClass, std::vector<LeaseSlot*>> free_;
};

}  // namespace bitsparse::cuda
