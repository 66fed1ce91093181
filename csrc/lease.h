// A lease: one compressed tensor's hold on an arena, and the small tensor that stands for it.
//
// Autograd, checkpointing and torch.compile keep, pass and drop the handle like any saved tensor; its storage's deleter
// ends the lease. Only the storage matters, never its bytes: a handle that somebody overwrote still works, and a copy
// of a handle does not.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "bitsparse/arena.h"
#include "bitsparse/format.h"

namespace bitsparse {

constexpr std::int64_t kHandleBytes = 16;

// What was compressed.
struct LeaseInfo {
  std::int64_t numel;
  c10::ScalarType dtype;
  Codec codec;
  c10::Device device;
  std::int64_t columns = 0;  // geometry `patch`: of the matrix; 0: geometry `linear`
};

class Lease {
 public:
  explicit Lease(const LeaseInfo& info) : info_(info) {}
  virtual ~Lease() = default;
  const LeaseInfo& info() const { return info_; }

  // Writes the activation to `out`: contiguous, of the lease's numel, dtype and device.
  virtual void restore(const at::Tensor& out, Activation activation) = 0;
  // grad <- grad * activation', in place. Same requirements.
  virtual void gradient(const at::Tensor& grad, Activation activation) = 0;
  // (grad w) * activation' in one kernel, for matrices. Nothing where there is none for these operands.
  virtual std::optional<at::Tensor> linear_gradient(const at::Tensor& /*grad*/, const at::Tensor& /*w*/, Activation) {
    return std::nullopt;
  }

 private:
  LeaseInfo info_;
};

// The handle of a lease. `data` is kHandleBytes of the lease's device that live as long as the lease.
at::Tensor make_handle(std::unique_ptr<Lease> lease, void* data);

bool is_lease(const at::Tensor& handle);

// The lease behind a handle; throws if the tensor is none (a copy made by a saved-tensor hook, for one).
Lease& lease_of(const at::Tensor& handle);

}  // namespace bitsparse
