// Tensor maps and the launch of matrix products.
#pragma once

#include <cudaTypedefs.h>

#include <cstdint>

#include "device/hopper_linear.cuh"
#include "device/launch_config.cuh"
#include "launch.h"

namespace bitsparse::kernels {

// From this inner dimension on three codec warps keep up.
constexpr std::int64_t kLongDepth = 2048;

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// Of a row-major bfloat16 matrix, in boxes of 128 bytes a row. The driver wants a context, which a thread that has not
// called CUDA yet, as autograd's in a first backward, does not have: setting the device binds it.
inline bool make_map(CUtensorMap& map, const void* data, std::int64_t rows, std::int64_t columns, int box_rows) {
  const auto encode = tensor_map_encoder();
  int device = 0;
  if (!encode || cudaGetDevice(&device) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) return false;
  const cuuint64_t size[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[] = {static_cast<cuuint64_t>(2 * columns)};
  const cuuint32_t box[] = {LinearTile::kDepth, static_cast<cuuint32_t>(box_rows)}, step[] = {1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), size, stride, box, step,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// All but the maps.
inline LinearOperands operands_of(const void* bias, void* out, std::int64_t rows, std::int64_t columns,
                                  std::int64_t depth, const BlobStore& store) {
  LinearOperands operands{};
  operands.bias = bias;
  operands.out = out;
  operands.shape = {static_cast<int>(rows), static_cast<int>(columns), static_cast<int>(depth)};
  operands.store = store;
  return operands;
}

template <class Config>
cudaError_t launch_linear(const LinearOperands& operands, cudaStream_t stream) {
  constexpr auto kernel = linear_kernel<Config>;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = set_once<kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes>();
  if (error != cudaSuccess) return error;
  const unsigned blocks = processors / LinearTile::kCluster * LinearTile::kCluster;
  kernel<<<blocks, Config::kThreads, Config::kSharedBytes, stream>>>(operands);
  return cudaGetLastError();
}

}  // namespace bitsparse::kernels
