// Records: host-mapped memory that a lease's kernels write and the host reads without asking the device. They are apart
// from slots, as a slot goes to its next lease while the kernels of the last one may still be running.
#pragma once

#include <vector>

#include "launch.h"

namespace bitsparse::cuda {

class RecordPool {
 public:
  RecordPool() = default;
  ~RecordPool();
  RecordPool(const RecordPool&) = delete;
  RecordPool& operator=(const RecordPool&) = delete;

  volatile kernels::LeaseRecord* take();  // all zero
  // Only when no kernel will write it any more.
  void give_back(volatile kernels::LeaseRecord* record) { free_.push_back(record); }

 private:
  std::vector<void*> chunks_;
  std::vector<volatile kernels::LeaseRecord*> free_;
};

}  // namespace bitsparse::cuda
