// Learning that a CUDA graph is gone, so that what only its replays used can be used again.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "cuda/inbox.h"
#include "cuda/lease_state.h"

namespace bitsparse::cuda {

// Captured leases whose graph has been destroyed. The graph's callback may not call CUDA, so it leaves them here.
using OrphanedLeases = Inbox<LeaseState*>;

// Ties `lease` to the life of `graph` and of what is instantiated from it.
void own_by_graph(cudaGraph_t graph, LeaseState* lease, std::shared_ptr<OrphanedLeases> orphans);

}  // namespace bitsparse::cuda
