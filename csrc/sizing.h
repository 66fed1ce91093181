// How large a CUDA arena must be: the host's bookkeeping, in pages, without CUDA or torch.
//
// Each lease goes through: started (compress enqueued, size unknown) -> finished (size known) -> ending (release
// enqueued on its stream) -> ended (pages seen back). Two rules follow from stream order. A lease that is ending on
// stream S holds nothing when later work of S runs. A lease whose size is unknown may hold its worst case.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace bitsparse {

class Sizing {
 public:
  using LeaseId = std::uint64_t;
  using StreamId = const void*;

  // What is compressed again and again: tensors of one size, dtype and codec.
  using Kind = std::uint64_t;

  // `headroom`: capacity over the measured high-water mark in steady state.
  explicit Sizing(double headroom = 1.15) : headroom_(headroom) {}

  // Pages to have before a lease of `worst` pages starts on `stream`, and whether the host may wait for unfinished
  // leases to learn their size instead of having that much.
  struct Demand {
    std::int64_t pages;
    bool may_wait;
  };
  Demand demand(Kind kind, std::int64_t worst, StreamId stream) const;
  // The same when every live lease counts with its worst case (or the user's bound of it, given as `worst` at its
  // start).
  std::int64_t worst_case_demand(std::int64_t worst, StreamId stream) const;

  // Pages that the lease which starts now is expected to take: what the one that started with as many live leases took
  // last time, that is, in a training step, the same layer's. 0: nothing known.
  std::int64_t expected_pages(Kind kind) const;

  LeaseId start(Kind kind, std::int64_t worst, StreamId stream);
  void finish(LeaseId id, std::int64_t pages);
  void ending(LeaseId id);  // the last owner is gone
  void end(LeaseId id);
  // A captured graph owns the lease: it may hold its worst case whenever the graph runs, until the graph is gone.
  void pin(LeaseId id);
  void unpin(LeaseId id);

  // A step of training ends when no lease has an owner. True once after each step that changed what is known: time to
  // trim.
  bool take_trim_due();
  // Capacity for steady state, in pages.
  std::int64_t steady_pages() const;
  void note_high_water(std::int64_t pages);

  std::int64_t live() const { return live_; }
  std::int64_t high_water() const { return high_water_; }
  std::int64_t known_pages() const { return known_pages_; }
  LeaseId last_id() const { return next_ - 1; }
  bool idle() const { return leases_.empty(); }

 private:
  struct Entry {
    Kind kind;
    std::int64_t worst;
    std::int64_t pages = -1;  // unknown
    StreamId stream;
    std::size_t position;  // live leases when it started
    bool owned = true;
    bool pinned = false;
  };
  struct Seen {
    std::int64_t most_pages = 0;
    std::vector<std::int64_t> last_pages;  // by position
    bool completed_step = false;
  };

  // More kinds than any training run has; beyond it what was learnt is forgotten, so that random shapes don't add up.
  static constexpr std::size_t kMostKinds = 4096;

  template <class PagesOf>
  std::int64_t sum(StreamId stream, PagesOf pages_of) const;

  double headroom_;
  LeaseId next_ = 1;
  std::unordered_map<LeaseId, Entry> leases_;
  std::unordered_map<Kind, Seen> seen_;
  std::vector<Kind> new_kinds_;  // first seen in this step
  std::int64_t live_ = 0;        // leases with an owner
  std::int64_t most_live_ = 0;   // ... at once, in completed steps
  std::int64_t step_most_live_ = 0;
  std::int64_t high_water_ = 0;
  std::int64_t known_pages_ = 0;
  bool trim_due_ = false;
};

}  // namespace bitsparse
