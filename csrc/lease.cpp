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

bool is_lease(const at::Tensor& handle) {
  return handle.defined() && handle.has_storage() && handle.storage().data_ptr().get_deleter() == &end_lease;
}

Lease& lease_of(const at::Tensor& handle) {
  TORCH_CHECK(is_lease(handle),
              "bitsparse: lease: expected the tensor that the forward pass saved, got a copy of it (dtype ",
              handle.scalar_type(), ", ", handle.numel(), " elements, ", handle.device(),
              "). A lease cannot be copied: around a torch.compile'd model, saved-tensor hooks that move or clone what "
              "they are given are not supported");
  return *static_cast<Lease*>(handle.storage().data_ptr().get_context());
}

}  // namespace bitsparse
