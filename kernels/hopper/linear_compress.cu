// The linear layer that compresses: tensor maps and the launch.
#define BITSPARSE_RARE __forceinline__  // the kernel changes its registers' number, and so can't call

#include <cudaTypedefs.h>

#include "device/launch_config.cuh"
#include "device/linear_compress.cuh"
#include "launch.h"

namespace bitsparse::kernels {
namespace {

// From this inner dimension on three codec warps keep up.
constexpr std::int64_t kLongDepth = 2048;

PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// Of a row-major bfloat16 matrix, in boxes of 128 bytes a row.
bool make_map(CUtensorMap& map, const void* data, std::int64_t rows, std::int64_t columns, int box_rows) {
  const auto encode = tensor_map_encoder();
  if (!encode) return false;
  const cuuint64_t size[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[] = {static_cast<cuuint64_t>(2 * columns)};
  const cuuint32_t box[] = {LinearTile::kDepth, static_cast<cuuint32_t>(box_rows)}, step[] = {1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), size, stride, box, step,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <Codec C, Epilogue E, bool ManyCodecWarps>
cudaError_t launch_linear(const LinearOperands& operands, cudaStream_t stream) {
  using Config = LinearConfig<C, E, ManyCodecWarps>;
  constexpr auto kernel = linear_compress_kernel<Config>;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
  if (error != cudaSuccess) return error;
  const unsigned blocks = processors / LinearTile::kCluster * LinearTile::kCluster;
  kernel<<<blocks, Config::kThreads, Config::kSharedBytes, stream>>>(operands);
  return cudaGetLastError();
}

template <Codec C, Epilogue E>
cudaError_t launch_codec(const LinearOperands& operands, cudaStream_t stream) {
  if (operands.shape.depth < kLongDepth) return launch_linear<C, E, true>(operands, stream);
  return launch_linear<C, E, false>(operands, stream);
}

template <Epilogue E>
cudaError_t launch_epilogue(const LinearOperands& operands, Codec codec, cudaStream_t stream) {
  if (codec == Codec::raw) return launch_codec<Codec::raw, E>(operands, stream);
  if (codec == Codec::signless) return launch_codec<Codec::signless, E>(operands, stream);
  return launch_codec<Codec::tight, E>(operands, stream);
}

}  // namespace

cudaError_t linear_compress(const void* x, const void* w, const void* bias, void* out, std::int64_t rows,
                            std::int64_t columns, std::int64_t depth, Codec codec, Epilogue activation,
                            const BlobStore& store, cudaStream_t stream) {
  LinearOperands operands;
  operands.bias = bias;
  operands.out = out;
  operands.shape = {static_cast<int>(rows), static_cast<int>(columns), static_cast<int>(depth)};
  operands.store = store;
  if (!make_map(operands.x, x, rows, depth, LinearTile::kRows) ||
      !make_map(operands.w, w, columns, depth, LinearTile::kColumns / LinearTile::kCluster))
    return cudaErrorNotSupported;
  if (activation == Epilogue::relu) return launch_epilogue<Epilogue::relu>(operands, codec, stream);
  return launch_epilogue<Epilogue::relu_squared>(operands, codec, stream);
}

bool linear_compresses(std::int64_t rows, std::int64_t columns, std::int64_t depth, int major, int minor) {
  constexpr std::int64_t kMost = std::int64_t{1} << 24;  // rows: coordinates, counts of tiles
  return major == 9 && minor == 0 && rows > 0 && rows < kMost && columns > 0 && columns < kMost && depth < kMost &&
         rows % LinearTile::kClusterRows == 0 && columns % LinearTile::kColumns == 0 &&
         depth % LinearTile::kDepth == 0 && depth >= 4 * LinearTile::kDepth &&
         rows / Patch::kRows * (columns / Patch::kTileColumns) < kMost;
}

}  // namespace bitsparse::kernels
