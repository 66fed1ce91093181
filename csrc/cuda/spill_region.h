// Pinned host memory that kernels reach directly.
//
// Getting some hundred MiB of it takes tens of milliseconds, most of which the system spends on clearing and mapping
// pages. That needs no CUDA, so a thread of its own does it ahead of time, and pinning them is quick.
#pragma once

#include <cstdint>
#include <memory>

namespace bitsparse::cuda {

// Not thread-safe.
class SpillRegion {
 public:
  SpillRegion() = default;
  ~SpillRegion();
  SpillRegion(const SpillRegion&) = delete;
  SpillRegion& operator=(const SpillRegion&) = delete;

  // Has memory made ready in the background, to be pinned later.
  void prepare(std::int64_t bytes);
  // The region's address for kernels; waits for the memory that was prepared, if it was. Null if the system has none.
  // Once.
  void* pin(std::int64_t bytes);

 private:
  struct Prepared;
  std::shared_ptr<Prepared> prepared_;  // the thread's too
  bool registered_ = false;
  void* allocated_ = nullptr;  // by CUDA
};

}  // namespace bitsparse::cuda
