// Launching a kernel with as much shared memory a multiprocessor as there is: thread blocks are many and small.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace bitsparse::kernels {

constexpr int kMaxDefaultSharedBytes = 48 << 10;  // more would have to be asked for

// Sets an attribute of a kernel once a device: a driver call at every launch would cost microseconds. Legal during
// graph capture.
template <auto kernel, cudaFuncAttribute attribute, int value>
cudaError_t set_once() {
  static std::atomic<std::uint64_t> done{0};  // a bit a device
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::uint64_t bit = std::uint64_t{1} << (device & 63);
  if (device < 64 && (done.load(std::memory_order_relaxed) & bit)) return cudaSuccess;
  error = cudaFuncSetAttribute(kernel, attribute, value);
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

template <auto kernel, class Config, class... Args>
cudaError_t launch(std::int64_t blocks, cudaStream_t stream, Args... args) {
  static_assert(Config::kSharedBytes <= kMaxDefaultSharedBytes, "a kernel may use this much without asking");
  constexpr int kMost = cudaSharedmemCarveoutMaxShared;
  const cudaError_t error = set_once<kernel, cudaFuncAttributePreferredSharedMemoryCarveout, kMost>();
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), Config::kThreads, Config::kSharedBytes, stream>>>(args...);
  return cudaGetLastError();
}

}  // namespace bitsparse::kernels
