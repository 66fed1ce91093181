#include "lease.h"

#include <ATen/ops/from_blob.h>

namespace bitsparse {
namespace {

void end_lease(void* lease) { delete static_cast<Lease*>(lease); }

}  // namespace

at::Tensor make_handle(std::unique_ptr<Lease> lease, void* data) {
  const c10::Device device = lease->info().device;
  return at::for_blob(data, {kHandleBytes})
      .context(lease.release(), &end_lease)
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

Lease& lease_of(const at::Tensor& handle) {
  TORCH_CHECK(handle.defined() && handle.has_storage(), "bitsparse: lease: expected a lease, got a tensor without storage");
  const c10::DataPtr& data = handle.storage().data_ptr();
  TORCH_CHECK(data.get_deleter() == &end_lease,
              "bitsparse: lease: expected the tensor that the forward pass saved, got a copy of it (dtype ", handle.scalar_type(), ", ",
              handle.numel(), " elements, ", handle.device(),
              "). A lease cannot be copied: saved-tensor hooks that move or clone saved tensors inside a compiled graph are not supported");
  return *static_cast<Lease*>(data.get_context());
}

}  // namespace bitsparse
