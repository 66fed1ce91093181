// The block operators: checks, the differentiable path, the path without gradients, autocast.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "activation.h"
#include "activation_ops.h"
#include "bitsparse/compressed_tensor.h"
#include "bitsparse/functional.h"
#include "bitsparse/saved_tensor_hooks.h"
#include "checks.h"
#include "linear.h"
#include "names.h"
#include "typed_operator.h"

namespace bitsparse {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;

struct Gradients {
  at::Tensor h, w2, b2, b1;
};

// Is the activation of h column-major in eager mode? Its layout can choose the GEMM kernel, so the block's gets the
// same. Only matrices come here with other layouts than contiguous. This is TensorIterator's rule: the dimension with
// the smaller stride is the inner one, of equal strides the smaller dimension, and expanded ones decide nothing. relu's
// result is what square sees, whose own has the usual strides if that was contiguous.
bool gives_column_major(const at::Tensor& h, Activation activation) {
  if (h.dim() != 2 || h.is_contiguous()) return false;
  const c10::SymInt rows = h.sym_stride(0), columns = h.sym_stride(1);
  if (rows == 0 || columns == 0) return false;
  if (activation == Activation::relu_squared && (h.sym_size(0) == 1 || h.sym_size(1) == 1)) return false;
  return rows < columns || (rows == columns && h.sym_size(0) < h.sym_size(1));
}

// What backward knows of forward beside tensors. Layouts are noted, as hooks may bring tensors back in others.
struct LayerInfo {
  std::string activation;
  c10::SymInt d_ff;
  bool column_major;      // the activation that forward multiplied
  bool w2t_column_major;  // w2ᵀ, which it was multiplied with
  bool fused;             // the product with the gradient may be fused, too
  bool need_h, need_w2, need_b2, need_b1;
};

// May a tensor that nobody else holds be overwritten? Not where a dispatch mode may have kept it, as selective
// activation checkpointing does. Those of the compiler itself work on a program, in which an overwritten tensor is one.
bool may_overwrite() { return !c10::impl::TorchDispatchModeTLS::any_modes_set(/*skip_infra_modes=*/true); }

// Gradients of y = activation(h) w2ᵀ + b2 from the lease of h. At most one wide tensor at a time beside what is
// returned: the activation is gone before d loss / d activation is made, and that becomes d loss / d h in place.
Gradients linear_backward(at::Tensor grad, const at::Tensor& lease, const at::Tensor& w2t, const LayerInfo& info) {
  std::vector<c10::SymInt> wide = grad.sym_sizes().vec();
  const c10::SymInt d_out = wide.back();
  wide.back() = info.d_ff;
  c10::SymInt tokens = 1;
  for (std::size_t i = 0; i + 1 < wide.size(); ++i) tokens = tokens * wide[i];
  if (grad.dim() != 2) grad = grad.reshape_symint({tokens, d_out});  // a matrix stays as it is, as in eager mode

  Gradients g;
  if (info.need_b2) g.b2 = grad.sum(0);
  if (info.need_w2) {
    std::vector<c10::SymInt> in_memory{tokens, info.d_ff};
    if (info.column_major) std::swap(in_memory[0], in_memory[1]);
    const at::Tensor a = ops::restore_activation(lease, in_memory, grad.scalar_type(), info.activation);
    g.w2 = linear_weight_gradient(grad, info.column_major ? a.t() : a, info.w2t_column_major);
  }
  if (info.need_h || info.need_b1) {
    // The layout of the activation that forward multiplied: a single element is both row- and column-major.
    const bool column_major = info.column_major || (tokens == 1 && info.d_ff == 1);
    at::Tensor h;
    if (info.fused && !column_major) {
      h = ops::linear_gradient(grad, w2t.t(), lease, info.activation);
    } else {
      h = linear_input_gradient(grad, w2t, column_major);
      if (!may_overwrite()) h = h.clone();
      ops::activation_gradient_(info.column_major ? h.t() : h, lease, info.activation);
    }
    if (info.need_b1) g.b1 = h.sum(0);
    if (info.need_h) g.h = h.reshape_symint(wide);
    // As elementwise operators return it.
    if (info.need_h && info.column_major && g.h.is_contiguous()) g.h = g.h.as_strided_symint(wide, {info.d_ff, 1});
  }
  return g;
}

// In a backward: gives `t` the place in the graph that the node's i-th input has, so that what is computed from it
// leads to wherever that came from.
at::Tensor in_place_of_input(at::Tensor t, std::size_t i) {
  const auto node = torch::autograd::get_current_node();
  TORCH_INTERNAL_ASSERT(node && node->num_outputs() > i, "bitsparse: backward outside of autograd");
  if (node->next_edge(i).is_valid()) torch::autograd::impl::set_gradient_edge(t, node->next_edge(i));
  return t;
}
// For an input that is not kept: a tensor without elements.
at::Tensor stand_in(std::size_t i) { return in_place_of_input(at::empty({0}), i); }

// With create_graph, gradients of gradients would be wrong without this node: its backward says so. The tensors after
// `grad` stand for what the results depend on beside it. Their data is in the lease and in w2t.
struct OnceDifferentiable : torch::autograd::Function<OnceDifferentiable> {
  static variable_list forward(AutogradContext*, const at::Tensor& grad, const at::Tensor& /*h*/,
                               const at::Tensor& /*w2*/, const at::Tensor& /*b1*/, const at::Tensor& lease,
                               const OptionalTensor& w2t, const LayerInfo& info) {
    at::AutoDispatchBelowADInplaceOrView guard;
    Gradients g = linear_backward(grad, lease, w2t.value_or(at::Tensor()), info);
    variable_list needed;  // outputs of a Function must be defined
    for (at::Tensor* t : {&g.h, &g.w2, &g.b2, &g.b1})
      if (t->defined()) needed.push_back(std::move(*t));
    return needed;
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "bitsparse: double backward is not supported: a compressed activation is differentiable once. Use the "
        "dense block for losses that need gradients of gradients");
  }
};

// y = activation(h) w2ᵀ + b2, keeping a lease of h. `overwrite`: h is ours and may become the activation. `b1`: a bias
// that h contains without autograd's knowledge. Its gradient is made here, as the sum, for which PyTorch can allocate
// a hundred MiB, is best done before the first layer's gradients are there. `given_lease`: h has been
// compressed, and is the activation already.
struct ActivationLinear : torch::autograd::Function<ActivationLinear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& h, const at::Tensor& w2, const OptionalTensor& b2,
                            const OptionalTensor& b1, const OptionalTensor& given_lease, const std::string& activation,
                            const std::string& codec, bool overwrite) {
    // As eager mode saves it: the values of now, whatever w2.data is set to, with an error if they are overwritten.
    // Made above the guard, where a view shares its base's version counter.
    const at::Tensor w2t = w2.detach().t();
    at::AutoDispatchBelowADInplaceOrView guard;
    const bool column_major = !given_lease && gives_column_major(h, parse_activation(activation));
    at::Tensor a = column_major ? h.t() : h, lease;
    if (given_lease) {
      lease = *given_lease;
    } else if (saved_tensors_may_be_copied()) {
      a = at::relu(a);
      lease = pack(a, codec, "positive");
      activate_relu_(a, parse_activation(activation));
    } else if (overwrite) {
      lease = ops::compress_activation_(a, activation, codec);
    } else {
      std::tie(a, lease) = ops::compress_activation(a, activation, codec);
    }
    if (column_major) a = a.t();
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({h.requires_grad() || b1 ? w2t : at::Tensor(), lease});
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["d_ff"] = w2.sym_size(1);
    ctx->saved_data["column_major"] = column_major;
    ctx->saved_data["w2t_column_major"] = is_column_major(w2t);
    ctx->saved_data["has_b2"] = b2.has_value();
    ctx->saved_data["has_b1"] = b1.has_value();
    ctx->saved_data["fused"] = given_lease.has_value();
    return at::linear(a, w2, b2);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(8);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &w2t = saved[0], &lease = saved[1];
    const auto flag = [&](const char* name) { return ctx->saved_data[name].toBool(); };
    const std::size_t b1_edge = flag("has_b2") ? 3 : 2;  // biases that are not there have none
    const LayerInfo info{ctx->saved_data["activation"].toStringRef(),
                         ctx->saved_data["d_ff"].toSymInt(),
                         flag("column_major"),
                         flag("w2t_column_major"),
                         flag("fused"),
                         ctx->needs_input_grad(0),
                         ctx->needs_input_grad(1),
                         flag("has_b2") && ctx->needs_input_grad(2),
                         flag("has_b1") && ctx->needs_input_grad(b1_edge)};
    Gradients g;
    if (at::GradMode::is_enabled()) {
      // Plain relu's gradient for h alone is constant in h, which depends on b1.
      const bool depends_on_h = info.need_w2 || parse_activation(info.activation) == Activation::relu_squared;
      const at::Tensor h = depends_on_h ? stand_in(0) : at::empty({0});
      const at::Tensor b1 = depends_on_h && flag("has_b1") ? stand_in(b1_edge) : at::empty({0});
      const variable_list found = OnceDifferentiable::apply(grads[0], h, stand_in(1), b1, lease,
                                                            w2t.defined() ? OptionalTensor(w2t) : std::nullopt, info);
      auto next = found.begin();
      if (info.need_h) g.h = *next++;
      if (info.need_w2) g.w2 = *next++;
      if (info.need_b2) g.b2 = *next++;
      if (info.need_b1) g.b1 = *next++;
    } else {
      g = linear_backward(grads[0], lease, w2t, info);
    }
    return {std::move(g.h), std::move(g.w2), std::move(g.b2), std::move(g.b1), {}, {}, {}, {}};
  }
};

// A first layer whose matrix product compresses: activation(h) and the lease of h = x w1ᵀ + b1, for matrices. What
// comes back is d loss / d h, as ActivationLinear, the only one to see these, takes the activation for the h of its
// lease. Without a kernel for it this is the dense layer, whose backward is eager mode's to the last bit.
struct LinearCompress : torch::autograd::Function<LinearCompress> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w1,
                               const OptionalTensor& b1, const std::string& activation, const std::string& codec) {
    const at::Tensor w1t = w1.detach().t();  // the values of now, as for w2
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [a, lease] = ops::linear_compress(x, w1, b1, activation, codec);
    ctx->mark_non_differentiable({lease});
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({w1.requires_grad() ? x : at::Tensor(), x.requires_grad() ? w1t : at::Tensor()});
    ctx->saved_data["x_column_major"] = is_column_major(x);
    ctx->saved_data["w1t_column_major"] = is_column_major(w1t);
    ctx->saved_data["has_b1"] = b1.has_value();
    return {a, lease};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor& h = grads[0];
    if (!h.defined()) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    at::Tensor w1t = saved[1];
    if (at::GradMode::is_enabled() && w1t.defined()) w1t = in_place_of_input(w1t.t().detach(), 1).t();
    const auto flag = [&](const char* name) { return ctx->saved_data[name].toBool(); };
    variable_list out(5);
    // First, as PyTorch can allocate a hundred MiB for it.
    if (flag("has_b1") && ctx->needs_input_grad(2)) out[2] = h.sum(0);
    if (ctx->needs_input_grad(0)) out[0] = linear_input_gradient(h, w1t, flag("x_column_major"));
    if (ctx->needs_input_grad(1)) out[1] = linear_weight_gradient(h, x, flag("w1t_column_major"));
    return out;
  }
};

at::Tensor dense_linear(at::Tensor h, const at::Tensor& w2, const OptionalTensor& b2, Activation activation) {
  h = h.relu();
  if (activation == Activation::relu_squared) h = h.square();
  return at::linear(h, w2, b2);
}

bool requires_grad(const at::Tensor& t) { return t.requires_grad(); }

// With more than two dimensions, eager mode chooses its matrix products and the sum for a bias's gradient by layouts:
// contiguous ones are treated as matrices are.
bool is_as_matrix(const at::Tensor& x, const OptionalTensor& bias) {
  return x.dim() == 2 || (x.dim() > 2 && x.is_contiguous() && (!bias || bias->is_contiguous()));
}

// A lease pays where backward needs the activation. A vector has nothing to save and other matrix products; it and what
// is not as a matrix stay dense, so as to be equal by construction.
bool keeps_lease(const at::Tensor& h, const at::Tensor& w2, const OptionalTensor& b2) {
  return at::GradMode::is_enabled() && (requires_grad(h) || requires_grad(w2)) && is_as_matrix(h, b2);
}

// Other layouts may get other matrix products in eager mode. Hooks that may copy what is saved, and modes that may keep
// what ops return, are known to the other way.
bool may_fuse(const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1, const at::Tensor& w2,
              const OptionalTensor& b2) {
  const bool needed = requires_grad(x) || requires_grad(w1) || requires_grad(w2) || (b1 && requires_grad(*b1));
  return at::GradMode::is_enabled() && needed && x.is_contiguous() && w1.is_contiguous() && w2.is_contiguous() &&
         is_as_matrix(x, b1) && is_as_matrix(x, b2) && !saved_tensors_may_be_copied() && may_overwrite();
}

template <Activation A>
at::Tensor linear_autograd(const at::Tensor& h, const at::Tensor& w2, const OptionalTensor& b2,
                           std::string_view codec) {
  check_linear(A == Activation::relu ? "relu_linear" : "relu_squared_linear", h, w2, b2);
  parse_codec(codec);
  if (!keeps_lease(h, w2, b2)) return dense_linear(h, w2, b2, A);
  return ActivationLinear::apply(h, w2, b2, std::nullopt, std::nullopt, std::string(activation_name(A)),
                                 std::string(codec), /*overwrite=*/false);
}

template <Activation A>
at::Tensor ffn_autograd(const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1, const at::Tensor& w2,
                        const OptionalTensor& b2, std::string_view codec, bool fused) {
  check_ffn(A == Activation::relu ? "relu_ffn" : "relu_squared_ffn", x, w1, b1, w2, b2);
  parse_codec(codec);
  if (fused && may_fuse(x, w1, b1, w2, b2)) {
    const at::Tensor rows = x.dim() == 2 ? x : x.flatten(0, -2);
    const variable_list first =
        LinearCompress::apply(rows, w1, b1, std::string(activation_name(A)), std::string(codec));
    const at::Tensor y = ActivationLinear::apply(first[0], w2, b2, std::nullopt, first[1],
                                                 std::string(activation_name(A)), std::string(codec), false);
    return x.dim() == 2 ? y : y.unflatten_symint(0, x.sym_sizes().slice(0, x.dim() - 1));
  }
  // The first layer is autograd's own: what it saves (x and w1) is what a block of one piece would save, and its
  // gradients are the dense ones by construction: all but its bias's.
  const bool own_b1 =
      at::GradMode::is_enabled() && b1 && requires_grad(*b1) && is_as_matrix(x, b1) && is_as_matrix(x, b2);
  at::Tensor h = at::linear(x, w1, own_b1 ? OptionalTensor(b1->detach()) : b1);
  if (!own_b1 && !keeps_lease(h, w2, b2)) return dense_linear(std::move(h), w2, b2, A);
  return ActivationLinear::apply(h, w2, b2, own_b1 ? b1 : std::nullopt, std::nullopt, std::string(activation_name(A)),
                                 std::string(codec), may_overwrite());
}

// Below autograd nothing is saved.
template <Activation A>
at::Tensor linear_inference(const at::Tensor& h, const at::Tensor& w2, const OptionalTensor& b2,
                            std::string_view codec) {
  check_linear(A == Activation::relu ? "relu_linear" : "relu_squared_linear", h, w2, b2);
  parse_codec(codec);
  return dense_linear(h, w2, b2, A);
}

template <Activation A>
at::Tensor ffn_inference(const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1, const at::Tensor& w2,
                         const OptionalTensor& b2, std::string_view codec, bool /*fused*/) {
  check_ffn(A == Activation::relu ? "relu_ffn" : "relu_squared_ffn", x, w1, b1, w2, b2);
  parse_codec(codec);
  return dense_linear(at::linear(x, w1, b1), w2, b2, A);
}

// Autocast as for linear: every tensor to the lower precision.
at::Tensor cast(const at::Tensor& t, c10::DeviceType device) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), t, device);
}
OptionalTensor cast(const OptionalTensor& t, c10::DeviceType device) {
  return t ? OptionalTensor(cast(*t, device)) : std::nullopt;
}

template <Activation A, c10::DeviceType Device>
at::Tensor linear_autocast(const at::Tensor& h, const at::Tensor& w2, const OptionalTensor& b2,
                           std::string_view codec) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(Device));
  const auto op = A == Activation::relu ? relu_linear : relu_squared_linear;
  return op(cast(h, Device), cast(w2, Device), cast(b2, Device), codec);
}

template <Activation A, c10::DeviceType Device>
at::Tensor ffn_autocast(const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1, const at::Tensor& w2,
                        const OptionalTensor& b2, std::string_view codec, bool fused) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(Device));
  const auto op = A == Activation::relu ? relu_ffn : relu_squared_ffn;
  return op(cast(x, Device), cast(w1, Device), cast(b1, Device), cast(w2, Device), cast(b2, Device), codec, fused);
}

template <c10::DeviceType Device>
void register_autocast(torch::Library& m) {
  m.impl("relu_ffn", ffn_autocast<Activation::relu, Device>);
  m.impl("relu_squared_ffn", ffn_autocast<Activation::relu_squared, Device>);
  m.impl("relu_linear", linear_autocast<Activation::relu, Device>);
  m.impl("relu_squared_linear", linear_autocast<Activation::relu_squared, Device>);
}

void register_inference(torch::Library& m) {
  m.impl("relu_ffn", ffn_inference<Activation::relu>);
  m.impl("relu_squared_ffn", ffn_inference<Activation::relu_squared>);
  m.impl("relu_linear", linear_inference<Activation::relu>);
  m.impl("relu_squared_linear", linear_inference<Activation::relu_squared>);
}

using FfnSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                                const OptionalTensor&, std::string_view, bool);
using LinearSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, std::string_view);

}  // namespace

TORCH_LIBRARY_IMPL(bitsparse, Autograd, m) {
  m.impl("relu_ffn", ffn_autograd<Activation::relu>);
  m.impl("relu_squared_ffn", ffn_autograd<Activation::relu_squared>);
  m.impl("relu_linear", linear_autograd<Activation::relu>);
  m.impl("relu_squared_linear", linear_autograd<Activation::relu_squared>);
}
TORCH_LIBRARY_IMPL(bitsparse, CPU, m) { register_inference(m); }
TORCH_LIBRARY_IMPL(bitsparse, CUDA, m) { register_inference(m); }
TORCH_LIBRARY_IMPL(bitsparse, Meta, m) { register_inference(m); }
TORCH_LIBRARY_IMPL(bitsparse, AutocastCPU, m) { register_autocast<c10::kCPU>(m); }
TORCH_LIBRARY_IMPL(bitsparse, AutocastCUDA, m) { register_autocast<c10::kCUDA>(m); }

at::Tensor relu_squared_ffn(const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1, const at::Tensor& w2,
                            const OptionalTensor& b2, std::string_view codec, bool fused) {
  static const auto op = typed_operator<FfnSignature>("bitsparse::relu_squared_ffn");
  return op.call(x, w1, b1, w2, b2, codec, fused);
}
at::Tensor relu_ffn(const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1, const at::Tensor& w2,
                    const OptionalTensor& b2, std::string_view codec, bool fused) {
  static const auto op = typed_operator<FfnSignature>("bitsparse::relu_ffn");
  return op.call(x, w1, b1, w2, b2, codec, fused);
}
at::Tensor relu_squared_linear(const at::Tensor& h, const at::Tensor& w2, const OptionalTensor& b2,
                               std::string_view codec) {
  static const auto op = typed_operator<LinearSignature>("bitsparse::relu_squared_linear");
  return op.call(h, w2, b2, codec);
}
at::Tensor relu_linear(const at::Tensor& h, const at::Tensor& w2, const OptionalTensor& b2, std::string_view codec) {
  static const auto op = typed_operator<LinearSignature>("bitsparse::relu_linear");
  return op.call(h, w2, b2, codec);
}

}  // namespace bitsparse
