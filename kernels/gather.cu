// Blobs in tile order: what a self-contained compressed tensor needs, as compress places them in any order.
#include "device/blob_store.cuh"
#include "launch.h"

namespace bitsparse::kernels {
namespace {

// One warp a blob.
__global__ void gather_blobs_kernel(BlobStore from, const std::uint64_t* ordered_tiles, std::int64_t tiles,
                                    std::uint8_t* payload) {
  const std::int64_t tile = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  if (tile >= tiles) return;
  std::uint32_t units;
  const Placement blob = find_blob(from, from.tiles[tile], units);
  uint4* to = reinterpret_cast<uint4*>(payload + entry_offset(ordered_tiles[tile]) * kUnitBytes);
  for (std::uint32_t i = threadIdx.x % kLanes; i < units; i += kLanes) {
    const std::uint8_t* p =
        i < blob.first_units ? blob.first + i * kUnitBytes : blob.second + (i - blob.first_units) * kUnitBytes;
    to[i] = *reinterpret_cast<const uint4*>(p);
  }
}

}  // namespace

cudaError_t gather_blobs(const BlobStore& from, const std::uint64_t* ordered_tiles, std::int64_t tiles, void* payload,
                         cudaStream_t stream) {
  constexpr int kThreads = 128;
  const std::int64_t blocks = (tiles * kLanes + kThreads - 1) / kThreads;
  gather_blobs_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(from, ordered_tiles, tiles,
                                                                              static_cast<std::uint8_t*>(payload));
  return cudaGetLastError();
}

}  // namespace bitsparse::kernels
