// CUDA error codes as exceptions.
#pragma once

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

namespace bitsparse::cuda {

inline void check(cudaError_t error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, "bitsparse: ", what, ": ", cudaGetErrorString(error));
}

}  // namespace bitsparse::cuda
