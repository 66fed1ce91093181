#include "linear.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/t.h>

namespace bitsparse {

bool is_column_major(const at::Tensor& matrix) {
  return matrix.sym_stride(0) == 1 && matrix.sym_stride(1) == matrix.sym_size(0);
}

at::Tensor linear_weight_gradient(const at::Tensor& grad, const at::Tensor& x, bool wt_is_column_major) {
  if (wt_is_column_major) return grad.t().mm(x);
  return x.t().mm(grad).t();
}

at::Tensor linear_input_gradient(const at::Tensor& grad, const at::Tensor& wt, bool x_is_column_major) {
  if (x_is_column_major) return wt.mm(grad.t()).t();
  return grad.mm(wt.t());
}

}  // namespace bitsparse
