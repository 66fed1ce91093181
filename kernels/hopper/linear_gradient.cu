#include "device/linear_gradient.cuh"
#include "hopper/linear_launch.cuh"
#include "launch.h"

namespace bitsparse::kernels {

cudaError_t linear_gradient(const void* grad, const void* w, void* out, std::int64_t rows, std::int64_t columns,
                            std::int64_t depth, Epilogue activation, const BlobStore& store, cudaStream_t stream) {
  LinearOperands operands = operands_of(nullptr, out, rows, columns, depth, store);
  if (!make_map(operands.x, grad, rows, depth, LinearTile::kRows) ||
      !make_map(operands.w, w, depth, columns, LinearTile::kDepth))
    return cudaErrorNotSupported;
  if (activation == Epilogue::relu) return launch_linear<LinearGradient<Epilogue::relu>>(operands, stream);
  return launch_linear<LinearGradient<Epilogue::relu_squared>>(operands, stream);
}

bool linear_gradient_pays(std::int64_t rows, std::int64_t columns, std::int64_t depth, int major, int minor) {
  return depth >= kLongDepth && linear_compresses(rows, columns, depth, major, minor);
}

}  // namespace bitsparse::kernels
