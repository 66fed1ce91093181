#include "cuda/record_pool.h"

#include <cuda_runtime_api.h>

#include "cuda/capture.h"
#include "cuda/check.h"

namespace bitsparse::cuda {

constexpr std::size_t kRecordsPerChunk = 1024;

RecordPool::~RecordPool() {
  for (void* chunk : chunks_) cudaFreeHost(chunk);
}

volatile kernels::LeaseRecord* RecordPool::take() {
  if (free_.empty()) {
    void* chunk = nullptr;
    RelaxedCapture relaxed;
    check(cudaHostAlloc(&chunk, kRecordsPerChunk * sizeof(kernels::LeaseRecord),
                        cudaHostAllocMapped | cudaHostAllocPortable),
          "allocating host-mapped records");
    chunks_.push_back(chunk);
    for (std::size_t i = kRecordsPerChunk; i-- > 0;) free_.push_back(static_cast<kernels::LeaseRecord*>(chunk) + i);
  }
  volatile kernels::LeaseRecord* record = free_.back();
  free_.pop_back();
  record->units = 0;
  record->finished = 0;
  record->released = 0;
  record->lost_tiles = 0;
  record->spilled_pages = 0;
  record->high_water = 0;
  record->has_spilled = 0;
  return record;
}

}  // namespace bitsparse::cuda
