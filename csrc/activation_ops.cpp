#include "activation_ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "activation.h"
#include "bitsparse/arena.h"
#include "bitsparse/compressed_tensor.h"
#include "lease.h"
#include "names.h"
#include "typed_operator.h"

namespace bitsparse {
namespace {

void check_lease_matches(const char* op, const Lease& lease, const at::Tensor& t) {
  const LeaseInfo& info = lease.info();
  TORCH_CHECK(t.numel() == info.numel && t.scalar_type() == info.dtype && t.device() == info.device, "bitsparse::", op,
              ": the lease holds ", info.numel, " elements of ", info.dtype, " on ", info.device, ", but ", t.numel(),
              " of ", t.scalar_type(), " on ", t.device(), " were asked for");
}

// Kernels believe what they are told about sizes.
void check_product(const char* op, const char* left_name, const at::Tensor& left, const char* right_name,
                   const at::Tensor& right, bool transposed) {
  TORCH_CHECK_VALUE(left.dim() == 2 && right.dim() == 2 && left.size(1) == right.size(transposed ? 1 : 0),
                    "bitsparse::", op, ": expected matrices ", left_name, " and ", right_name,
                    " that can be multiplied, got ", left.sizes(), " and ", right.sizes());
}

at::Tensor compress_to(const at::Tensor& h, const at::Tensor& out, std::string_view activation,
                       std::string_view codec) {
  return current_arena(h.device())->compress(h, out, parse_codec(codec), parse_activation(activation));
}

at::Tensor compress_in_place(at::Tensor& h, std::string_view activation, std::string_view codec) {
  if (h.is_contiguous()) return compress_to(h, h, activation, codec);
  const at::Tensor dense = h.contiguous();
  at::Tensor lease = compress_to(dense, dense, activation, codec);
  h.copy_(dense);
  return lease;
}

std::tuple<at::Tensor, at::Tensor> compress_copy(const at::Tensor& h, std::string_view activation,
                                                 std::string_view codec) {
  const at::Tensor dense = h.contiguous();
  // Strides of dimensions of size 1, too, are those of what relu returns.
  const at::Tensor out =
      dense.is_same(h) ? at::empty_like(dense, dense.options(), at::MemoryFormat::Contiguous) : dense;
  at::Tensor lease = compress_to(dense, out, activation, codec);
  return {out, lease};
}

// activation(x wᵀ + bias) and a lease of x wᵀ + bias, for matrices: in one kernel where there is one.
std::tuple<at::Tensor, at::Tensor> linear_compress(const at::Tensor& x, const at::Tensor& w,
                                                   const std::optional<at::Tensor>& bias, std::string_view activation,
                                                   std::string_view codec) {
  check_product("_linear_compress", "x", x, "w", w, /*transposed=*/true);
  TORCH_CHECK_VALUE(!bias || (bias->dim() == 1 && bias->size(0) == w.size(0)),
                    "bitsparse::_linear_compress: expected bias to have shape [", w.size(0), "], got ", bias->sizes());
  if (auto both =
          current_arena(x.device())->linear_compress(x, w, bias, parse_codec(codec), parse_activation(activation)))
    return *both;
  at::Tensor out = at::linear(x, w, bias);
  at::Tensor lease = compress_in_place(out, activation, codec);
  return {out, lease};
}

// What the blocks save while saved-tensor hooks are active: relu(h) as a packed tensor. It has more bytes than any
// handle.
bool is_packed(const at::Tensor& saved) {
  return !is_lease(saved) && saved.numel() >= static_cast<std::int64_t>(sizeof(PackedHeader));
}

at::Tensor restore(const at::Tensor& handle, at::IntArrayRef size, at::ScalarType dtype, std::string_view activation) {
  if (is_packed(handle)) {
    at::Tensor relu = unpack(handle, size, dtype);
    activate_relu_(relu, parse_activation(activation));
    return relu;
  }
  Lease& lease = lease_of(handle);
  at::Tensor out = at::empty(size, handle.options().dtype(dtype));
  check_lease_matches("_restore_activation", lease, out);
  lease.restore(out, parse_activation(activation));
  return out;
}

void apply_gradient(at::Tensor& grad, const at::Tensor& handle, std::string_view activation) {
  if (is_packed(handle)) {
    const at::Tensor relu = unpack(handle, grad.sizes(), grad.scalar_type());
    grad.copy_(activation_gradient(relu, grad, parse_activation(activation)));
    return;
  }
  Lease& lease = lease_of(handle);
  check_lease_matches("_activation_gradient_", lease, grad);
  if (grad.is_contiguous()) return lease.gradient(grad, parse_activation(activation));
  const at::Tensor dense = grad.contiguous();
  lease.gradient(dense, parse_activation(activation));
  grad.copy_(dense);
}

// (grad w) * activation', for matrices: in one kernel where there is one.
at::Tensor linear_gradient(const at::Tensor& grad, const at::Tensor& w, const at::Tensor& handle,
                           std::string_view activation) {
  check_product("_linear_gradient", "grad", grad, "w", w, /*transposed=*/false);
  if (is_lease(handle))
    if (const auto out = lease_of(handle).linear_gradient(grad, w, parse_activation(activation))) return *out;
  at::Tensor out = grad.mm(w);
  apply_gradient(out, handle, activation);
  return out;
}

at::Tensor meta_handle(const at::Tensor& like) { return at::empty({kHandleBytes}, like.options().dtype(at::kByte)); }

at::Tensor compress_in_place_meta(at::Tensor& h, std::string_view, std::string_view) { return meta_handle(h); }
std::tuple<at::Tensor, at::Tensor> compress_copy_meta(const at::Tensor& h, std::string_view, std::string_view) {
  return {at::empty_symint(h.sym_sizes(), h.options()), meta_handle(h)};
}
std::tuple<at::Tensor, at::Tensor> linear_compress_meta(const at::Tensor& x, const at::Tensor& w,
                                                        const std::optional<at::Tensor>&, std::string_view,
                                                        std::string_view) {
  return {at::empty_symint({x.sym_size(0), w.sym_size(0)}, x.options()), meta_handle(x)};
}
at::Tensor restore_meta(const at::Tensor& handle, c10::SymIntArrayRef size, at::ScalarType dtype, std::string_view) {
  return at::empty_symint(size, handle.options().dtype(dtype));
}
at::Tensor linear_gradient_meta(const at::Tensor& grad, const at::Tensor& w, const at::Tensor&, std::string_view) {
  return at::empty_symint({grad.sym_size(0), w.sym_size(1)}, grad.options());
}
void gradient_meta(at::Tensor&, const at::Tensor&, std::string_view) {}

void register_backend(torch::Library& m) {
  m.impl("_compress_activation_", compress_in_place);
  m.impl("_compress_activation", compress_copy);
  m.impl("_linear_compress", linear_compress);
  m.impl("_restore_activation", restore);
  m.impl("_linear_gradient", linear_gradient);
  m.impl("_activation_gradient_", apply_gradient);
}

}  // namespace

TORCH_LIBRARY_IMPL(bitsparse, CPU, m) { register_backend(m); }
TORCH_LIBRARY_IMPL(bitsparse, CUDA, m) { register_backend(m); }
TORCH_LIBRARY_IMPL(bitsparse, Meta, m) {
  m.impl("_compress_activation_", compress_in_place_meta);
  m.impl("_compress_activation", compress_copy_meta);
  m.impl("_linear_compress", linear_compress_meta);
  m.impl("_restore_activation", restore_meta);
  m.impl("_linear_gradient", linear_gradient_meta);
  m.impl("_activation_gradient_", gradient_meta);
}

namespace ops {

at::Tensor compress_activation_(at::Tensor h, std::string_view activation, std::string_view codec) {
  static const auto op =
      typed_operator<at::Tensor(at::Tensor&, std::string_view, std::string_view)>("bitsparse::_compress_activation_");
  return op.call(h, activation, codec);
}

std::tuple<at::Tensor, at::Tensor> compress_activation(const at::Tensor& h, std::string_view activation,
                                                       std::string_view codec) {
  static const auto op =
      typed_operator<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, std::string_view, std::string_view)>(
          "bitsparse::_compress_activation");
  return op.call(h, activation, codec);
}

std::tuple<at::Tensor, at::Tensor> linear_compress(const at::Tensor& x, const at::Tensor& w,
                                                   const std::optional<at::Tensor>& bias, std::string_view activation,
                                                   std::string_view codec) {
  static const auto op = typed_operator<std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view, std::string_view)>(
      "bitsparse::_linear_compress");
  return op.call(x, w, bias, activation, codec);
}

at::Tensor restore_activation(const at::Tensor& lease, c10::SymIntArrayRef size, at::ScalarType dtype,
                              std::string_view activation) {
  static const auto op =
      typed_operator<at::Tensor(const at::Tensor&, c10::SymIntArrayRef, at::ScalarType, std::string_view)>(
          "bitsparse::_restore_activation");
  return op.call(lease, size, dtype, activation);
}

at::Tensor linear_gradient(const at::Tensor& grad, const at::Tensor& w, const at::Tensor& lease,
                           std::string_view activation) {
  static const auto op =
      typed_operator<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, std::string_view)>(
          "bitsparse::_linear_gradient");
  return op.call(grad, w, lease, activation);
}

void activation_gradient_(at::Tensor grad, const at::Tensor& lease, std::string_view activation) {
  static const auto op =
      typed_operator<void(at::Tensor&, const at::Tensor&, std::string_view)>("bitsparse::_activation_gradient_");
  op.call(grad, lease, activation);
}

}  // namespace ops
}  // namespace bitsparse
