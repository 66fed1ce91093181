#include "device/linear_compress.cuh"
#include "hopper/linear_launch.cuh"
#include "launch.h"

namespace bitsparse::kernels {
namespace {

template <Codec C, Epilogue E>
cudaError_t launch_codec(const LinearOperands& operands, cudaStream_t stream) {
  if (operands.shape.depth < kLongDepth) return launch_linear<LinearCompress<C, E, true>>(operands, stream);
  return launch_linear<LinearCompress<C, E, false>>(operands, stream);
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
  LinearOperands operands = operands_of(bias, out, rows, columns, depth, store);
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
         depth % LinearTile::kDepth == 0 && depth > LinearTile::kStages * LinearTile::kDepth &&
         rows / Patch::kRows * (columns / Patch::kTileColumns) < kMost;
}

}  // namespace bitsparse::kernels
