// Learning that a CUDA graph is gone, so that what only its replays used can be used again.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/lease_slot.h"

namespace bitsparse::cuda {

// Slots whose graph has been destroyed. The graph's callback may not call CUDA, so it leaves them here.
class OrphanedSlots {
 public:
  void add(LeaseSlot* slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    slots_.push_back(slot);
  }
  std::vector<LeaseSlot*> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(slots_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<LeaseSlot*> slots_;
};

// Ties `slot` to the life of `graph` and of what is instantiated from it.
void own_by_graph(cudaGraph_t graph, LeaseSlot* slot, std::shared_ptr<OrphanedSlots> orphans);

}  // namespace bitsparse::cuda
