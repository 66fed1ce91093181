// The operators that PyTorch sees.
#include <torch/library.h>

TORCH_LIBRARY(bitsparse, m) {
  // The blocks. Differentiable; outputs and gradients are those of the dense block, bit for bit.
  m.def(
      "relu_squared_ffn(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2=None, str codec=\"tight\", "
      "bool fused=False) -> Tensor");
  m.def(
      "relu_ffn(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2=None, str codec=\"tight\", bool fused=False) -> "
      "Tensor");
  m.def("relu_squared_linear(Tensor h, Tensor w2, Tensor? b2=None, str codec=\"tight\") -> Tensor");
  m.def("relu_linear(Tensor h, Tensor w2, Tensor? b2=None, str codec=\"tight\") -> Tensor");

  // Any tensor to its packed form and back.
  m.def("pack(Tensor t, str codec=\"tight\", str keep=\"nonzero\") -> Tensor");
  m.def("unpack(Tensor packed, SymInt[] size, ScalarType dtype, bool validated=False) -> Tensor");

  // What the blocks are made of; these take 8-bit floats, too: results are those of float arithmetic, rounded once, to
  // nearest even, saturating at the largest finite value, NaN the canonical 0x7f; relu keeps bits. The arena lives
  // outside of what functionalization and CUDA graph trees may copy or move: compilers run these ops between their
  // graphs.
  const std::vector<at::Tag> tags{at::Tag::cudagraph_unsafe};
  m.def("_compress_activation_(Tensor(a!) h, str activation, str codec) -> Tensor", tags);
  m.def("_compress_activation(Tensor h, str activation, str codec) -> (Tensor, Tensor)", tags);
  m.def("_linear_compress(Tensor x, Tensor w, Tensor? bias, str activation, str codec) -> (Tensor, Tensor)", tags);
  m.def("_restore_activation(Tensor lease, SymInt[] size, ScalarType dtype, str activation) -> Tensor", tags);
  m.def("_linear_gradient(Tensor grad, Tensor w, Tensor lease, str activation) -> Tensor", tags);
  m.def("_activation_gradient_(Tensor(a!) grad, Tensor lease, str activation) -> ()", tags);

  // The same kernels without an arena, in the caller's memory: a yardstick for benchmarks, on CUDA only.
  m.def("_contiguous(Tensor(a!) t, Tensor(b!) store, str operation, str activation, str codec) -> ()");
}
