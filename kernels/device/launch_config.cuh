// Launching a kernel with more shared memory than the default allows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace bitsparse::kernels {

template <class Kernel, class... Args>
cudaError_t launch(Kernel kernel, std::int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                   Args... args) {
  // Per device, cheap, and legal during graph capture.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(args...);
  return cudaGetLastError();
}

}  // namespace bitsparse::kernels
