#include "checks.h"

#include <c10/util/Exception.h>

namespace bitsparse {
namespace {

void check_strided(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.defined(), "bitsparse::", op, ": expected ", name, " to be a tensor, got None");
  TORCH_CHECK_VALUE(!t.is_nested(), "bitsparse::", op, ": expected ", name,
                    " to be a strided tensor, got a nested one");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, "bitsparse::", op, ": expected ", name,
                    " to be a strided tensor, got layout ", t.layout());
}

void check_activation_dtype(const char* op, const char* name, const at::Tensor& t) {
  check_strided(op, name, t);
  const auto type = t.scalar_type();
  TORCH_CHECK_TYPE(type == at::kBFloat16 || type == at::kHalf || type == at::kFloat, "bitsparse::", op, ": expected ",
                   name, " to have dtype bfloat16, float16 or float32, got ", type);
  TORCH_CHECK_VALUE(t.is_cpu() || t.is_cuda() || t.is_meta(), "bitsparse::", op, ": expected ", name,
                    " to be on cpu or cuda, got ", t.device());
}

void check_like(const char* op, const char* name, const at::Tensor& t, const char* reference_name,
                const at::Tensor& reference) {
  check_strided(op, name, t);
  TORCH_CHECK_TYPE(t.scalar_type() == reference.scalar_type(), "bitsparse::", op, ": expected ", name,
                   " to have the dtype of ", reference_name, " (", reference.scalar_type(), "), got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.device() == reference.device(), "bitsparse::", op, ": expected ", name,
                    " to be on the device of ", reference_name, " (", reference.device(), "), got ", t.device());
}

void check_dims(const char* op, const char* name, const at::Tensor& t, std::int64_t dims) {
  TORCH_CHECK_VALUE(t.dim() == dims, "bitsparse::", op, ": expected ", name, " to have ", dims, " dimension",
                    dims == 1 ? "" : "s", ", got shape ", t.sym_sizes());
}

// w (out, in) and b (out) of a layer whose input has `in` features.
void check_layer(const char* op, const char* input_name, const at::Tensor& input, const c10::SymInt& in,
                 const char* w_name, const at::Tensor& w, const char* b_name, const std::optional<at::Tensor>& b) {
  check_like(op, w_name, w, input_name, input);
  check_dims(op, w_name, w, 2);
  TORCH_CHECK_VALUE(w.sym_size(1) == in, "bitsparse::", op, ": expected ", w_name, " to have shape (*, ", in, "), got ",
                    w.sym_sizes());
  if (!b) return;
  check_like(op, b_name, *b, input_name, input);
  check_dims(op, b_name, *b, 1);
  TORCH_CHECK_VALUE(b->sym_size(0) == w.sym_size(0), "bitsparse::", op, ": expected ", b_name, " to have shape (",
                    w.sym_size(0), "), got ", b->sym_sizes());
}

void check_input(const char* op, const char* name, const at::Tensor& t) {
  check_activation_dtype(op, name, t);
  TORCH_CHECK_VALUE(t.dim() >= 1, "bitsparse::", op, ": expected ", name,
                    " to have at least 1 dimension, got a scalar");
}

}  // namespace

void check_linear(const char* op, const at::Tensor& h, const at::Tensor& w2, const std::optional<at::Tensor>& b2) {
  check_input(op, "h", h);
  check_layer(op, "h", h, h.sym_size(-1), "w2", w2, "b2", b2);
}

void check_ffn(const char* op, const at::Tensor& x, const at::Tensor& w1, const std::optional<at::Tensor>& b1,
               const at::Tensor& w2, const std::optional<at::Tensor>& b2) {
  check_input(op, "x", x);
  check_layer(op, "x", x, x.sym_size(-1), "w1", w1, "b1", b1);
  check_layer(op, "x", x, w1.sym_size(0), "w2", w2, "b2", b2);
}

}  // namespace bitsparse
