// A list that anybody may add to at any time, with a lock of its own that nobody holds for long. What an arena learns
// from callbacks and deleters goes here first: they may not wait for the arena's lock, whose holder may be waiting for
// the device, or for Python's lock that the caller holds.
#pragma once

#include <mutex>
#include <vector>

namespace bitsparse::cuda {

template <class Item>
class Inbox {
 public:
  void add(Item item) {
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(item);
  }
  // Everything since the last call, oldest first; to be iterated by one thread at a time.
  const std::vector<Item>& take() {
    taken_.clear();
    std::lock_guard<std::mutex> lock(mutex_);
    taken_.swap(items_);  // both keep their memory
    return taken_;
  }

 private:
  std::mutex mutex_;
  std::vector<Item> items_, taken_;
};

}  // namespace bitsparse::cuda
