// What the host knows of one lease, from its start until nothing on the device can write its record any more.
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <vector>

#include "cuda/capture.h"
#include "cuda/lease_slot.h"
#include "sizing.h"

namespace bitsparse::cuda {

struct LeaseState {
  enum class Phase {
    live,        // it has an owner
    kept,        // ended; its slot keeps the pages, for the next lease or as long as a graph exists
    taken_over,  // ended; another lease has its slot
    flushing,    // ended; a kernel that returns its pages is enqueued
    over,        // ended; no kernel has to do with it
  };
  // The last read by a stream that isn't the lease's own.
  struct Reader {
    c10::cuda::CUDAStream stream;
    CaptureId capture;  // the read is part of it, 0: none
    at::cuda::CUDAEvent read;
  };

  LeaseState(c10::cuda::CUDAStream home, LeaseSlot* slot, volatile kernels::LeaseRecord* record)
      : record(record), home(home), slot(slot) {}

  // What every call of the arena looks at, side by side.
  Phase phase = Phase::live;
  // From the record.
  bool finished = false;
  bool spilled = false;
  std::uint32_t lost_tiles = 0;
  std::uint32_t high_water = 0;  // pages
  std::int64_t units = 0;        // valid when finished
  volatile kernels::LeaseRecord* const record;
  // The graph capture it belongs to, until the graph is gone; 0: none. Atomic, as the lease's end looks at it without
  // the arena's lock.
  std::atomic<CaptureId> capture{0};

  Sizing::LeaseId id = 0;
  const c10::cuda::CUDAStream home;  // where it was compressed and where its pages are used again
  LeaseSlot* slot;                   // null once taken over
  std::int64_t numel = 0;
  std::int64_t dense_bytes = 0;
  std::vector<Reader> readers;

  // Who took the slot over. A kernel may write its record after it said `finished`; when the successor's, which runs
  // later, says so the predecessor's is through.
  LeaseState* successor = nullptr;
  bool has_predecessor = false;  // that waits for this record
};

// A lease whose owner is gone, before the arena has taken note of it.
struct EndedLease {
  LeaseState* lease;
  CaptureId capture;  // in which graph capture it ended, if the lease belongs to one; 0: in none
};

}  // namespace bitsparse::cuda
