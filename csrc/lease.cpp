#include "lease.h"

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>

namespace bitsparse {
namespace {

void end_lease(void* lease) { delete static_cast<Lease*>(lease); }

}  // namespace

// As at::from_blob makes one, without its checks of what is known here.
at::Tensor make_handle(std::unique_ptr<Lease> lease, void* data) {
  const c10::Device device = lease->info().device;
  c10::DataPtr owner(data, lease.release(), &end_lease, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), kHandleBytes, std::move(owner), /*allocator=*/nullptr,
                       /*resizable=*/false);
  const c10::DispatchKey key = c10::computeDispatchKey(at::kByte, at::kStrided, device);
  at::Tensor handle = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                               caffe2::TypeMeta::Make<std::uint8_t>());
  handle.unsafeGetTensorImpl()->set_sizes_contiguous({kHandleBytes});
  return handle;
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
