#include "cuda/graph_owner.h"

#include "cuda/check.h"

namespace bitsparse::cuda {
namespace {

struct Owned {
  LeaseState* lease;
  std::shared_ptr<OrphanedLeases> orphans;
};

void CUDART_CB graph_destroyed(void* data) {
  std::unique_ptr<Owned> owned(static_cast<Owned*>(data));
  owned->orphans->add(owned->lease);
}

}  // namespace

void own_by_graph(cudaGraph_t graph, LeaseState* lease, std::shared_ptr<OrphanedLeases> orphans) {
  auto owned = std::make_unique<Owned>(Owned{lease, std::move(orphans)});
  cudaUserObject_t object = nullptr;
  check(cudaUserObjectCreate(&object, owned.get(), graph_destroyed, 1, cudaUserObjectNoDestructorSync),
        "cudaUserObjectCreate");
  owned.release();
  check(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove), "cudaGraphRetainUserObject");
}

}  // namespace bitsparse::cuda
