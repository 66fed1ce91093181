// Leases that have ended and whose slots keep their pages: the next lease of the same size, stream and graph capture
// finds them there. The last to end comes first, as backward ends leases in reverse: a training step's first layer gets
// what it had the step before.
#pragma once

#include <algorithm>
#include <vector>

#include "cuda/lease_state.h"

namespace bitsparse::cuda {

class WarmSlots {
 public:
  struct Key {
    c10::cuda::CUDAStream home;
    SlotClass size;
    CaptureId capture;  // of the lease to come, 0: none
  };

  void add(LeaseState* lease) { leases_.push_back(lease); }
  void remove(LeaseState* lease) { leases_.erase(std::remove(leases_.begin(), leases_.end(), lease), leases_.end()); }
  // Stays in the list. Null if there is none.
  LeaseState* find(const Key& key) const {
    const auto found = std::find_if(leases_.rbegin(), leases_.rend(), [&](const LeaseState* lease) {
      return lease->capture == key.capture && lease->home == key.home && lease->slot->size == key.size;
    });
    return found == leases_.rend() ? nullptr : *found;
  }
  // Those for which wanted(lease), out of the list.
  template <class Predicate>
  std::vector<LeaseState*> take_if(Predicate wanted) {
    if (std::none_of(leases_.begin(), leases_.end(), [&](LeaseState* lease) { return wanted(*lease); })) return {};
    const auto taken =
        std::stable_partition(leases_.begin(), leases_.end(), [&](LeaseState* lease) { return !wanted(*lease); });
    std::vector<LeaseState*> result(taken, leases_.end());
    leases_.erase(taken, leases_.end());
    return result;
  }

 private:
  std::vector<LeaseState*> leases_;  // in the order of their ends
};

}  // namespace bitsparse::cuda
