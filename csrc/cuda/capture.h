// Is a stream being captured into a CUDA graph, and which?
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/check.h"

namespace bitsparse::cuda {

using CaptureId = unsigned long long;

struct Capture {
  CaptureId id = 0;  // 0: not capturing
  cudaGraph_t graph = nullptr;
  explicit operator bool() const { return id != 0; }
};

inline Capture capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  Capture capture;
#if CUDART_VERSION >= 13000
  check(cudaStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph), "cudaStreamGetCaptureInfo");
#else
  check(cudaStreamGetCaptureInfo_v2(stream, &status, &capture.id, &capture.graph), "cudaStreamGetCaptureInfo");
#endif
  return status == cudaStreamCaptureStatusActive ? capture : Capture{};
}

// While it lives, this thread may allocate and wait although some stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace bitsparse::cuda
