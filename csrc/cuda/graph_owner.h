// Learning that a CUDA graph is gone, so that what only its replays used can be used again.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/lease_state.h"

namespace bitsparse::cuda {

// Captured leases whose graph has been destroyed. The graph's callback may not call CUDA, so it leaves them here.
class OrphanedLeases {
 public:
  void add(LeaseState* lease) {
    std::lock_guard<std::mutex> lock(mutex_);
    leases_.push_back(lease);
  }
  std::vector<LeaseState*> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(leases_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<LeaseState*> leases_;
};

// Ties `lease` to the life of `graph` and of what is instantiated from it.
void own_by_graph(cudaGraph_t graph, LeaseState* lease, std::shared_ptr<OrphanedLeases> orphans);

}  // namespace bitsparse::cuda
