#include "float8.h"

#include <ATen/ops/isnan.h>
#include <ATen/ops/le.h>

#include <limits>

namespace bitsparse::float8 {
namespace {

constexpr int kNaN = 0x7f;  // of both formats

double largest(at::ScalarType type) {
  if (type == at::kFloat8_e4m3fn) return static_cast<float>(std::numeric_limits<c10::Float8_e4m3fn>::max());
  return static_cast<float>(std::numeric_limits<c10::Float8_e5m2>::max());
}

}  // namespace

at::Tensor rounded(at::Tensor values, at::ScalarType type) {
  const at::Tensor nan = values.isnan();  // PyTorch's conversion would keep its sign
  at::Tensor result = values.clamp_(-largest(type), largest(type)).to(type);
  result.view(at::kByte).masked_fill_(nan, kNaN);
  return result;
}

void keep_positive_(at::Tensor t, const at::Tensor& signs) {
  t.view(at::kByte).masked_fill_(signs.to(at::kFloat).le(0), 0);
}

}  // namespace bitsparse::float8
