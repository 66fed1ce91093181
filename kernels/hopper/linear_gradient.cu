#include "device/linear_gradient.cuh"
#include "hopper/linear_launch.cuh"
#include "launch.h"

namespace bitsparse::kernels {
namespace {

template <Epilogue E>
cudaError_t launch_gradient(const LinearOperands& operands, cudaStream_t stream) {
  if (operands.shape.depth < kLongDepth) return launch_linear<LinearGradient<E, true>>(operands, stream);
  return launch_linear<LinearGradient<E, false>>(operands, stream);
}

}  // namespace

cudaError_t linear_gradient(const void* grad, const void* w, void* out, std::int64_t rows, std::int64_t columns,
                            std::int64_t depth, Epilogue activation, const BlobStore& store, cudaStream_t stream) {
  LinearOperands operands;
  operands.bias = nullptr;
  operands.out = out;
  operands.shape = {static_cast<int>(rows), static_cast<int>(columns), static_cast<int>(depth)};
  operands.store = store;
  if (!make_map(operands.x, grad, rows, depth, LinearTile::kRows) ||
      !make_map(operands.w, w, depth, columns, LinearTile::kDepth))
    return cudaErrorNotSupported;
  if (activation == Epilogue::relu) return launch_gradient<Epilogue::relu>(operands, stream);
  return launch_gradient<Epilogue::relu_squared>(operands, stream);
}

}  // namespace bitsparse::kernels
