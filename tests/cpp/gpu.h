// Tests that need a GPU: skipped where there is none, failures there when BITSPARSE_REQUIRE_GPU=1.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#ifdef BITSPARSE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

// Why GPU tests can't run here; empty: they can.
inline std::string gpu_problem() {
#ifdef BITSPARSE_WITH_CUDA
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return count > 0 ? "" : "no CUDA device";
#else
  return "built without CUDA";
#endif
}

// To be called from SetUp.
inline void skip_without_gpu() {
  const std::string problem = gpu_problem();
  if (problem.empty()) return;
  const char* required = std::getenv("BITSPARSE_REQUIRE_GPU");
  if (required && std::string(required) == "1") FAIL() << "BITSPARSE_REQUIRE_GPU=1, but " << problem;
  GTEST_SKIP() << "GPU test: " << problem;
}

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override { skip_without_gpu(); }
};
