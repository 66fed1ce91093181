// How large a CUDA arena must be: the host's bookkeeping, in pages, without CUDA or torch.
//
// Each lease goes through: started (compress enqueued, size unknown) -> finished (size known) -> ended (its owner is
// gone, its pages stay where they are) -> taken over (the next lease of its stream has its pages, and this one counts
// nowhere) or flushing (release enqueued on its stream) -> gone (pages seen back).
//
// Two rules follow from stream order. A lease that has ended on stream S holds nothing when later work of S runs, as by
// then it was taken over or flushed; may_keep says when it need not be. A lease whose size is unknown may hold its
// worst case.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "by_id.h"

namespace bitsparse {

class Sizing {
 public:
  using LeaseId = std::uint64_t;
  using StreamId = const void*;

  // What is compressed again and again: tensors of one size, dtype and codec.
  using Kind = std::uint64_t;

  // `headroom`: capacity over the measured high-water mark in steady state.
  explicit Sizing(double headroom = 1.15) : headroom_(headroom) {}

  // A lease that is about to start.
  struct Request {
    Kind kind;
    std::int64_t worst;  // the most pages it can need, or the user's bound of that
    StreamId stream;
    LeaseId takes_over = 0;  // the ended lease of this stream whose pages it finds; 0: none
    bool captured = false;   // into a graph, whose replays no stream order can be relied on for
  };

  // Pages to have before the lease starts, and whether the host may wait for unfinished leases to learn their size
  // instead of having that much.
  struct Demand {
    std::int64_t pages;
    bool may_wait;
  };
  Demand demand(const Request& request) const;
  // The same when every lease counts with its worst case.
  std::int64_t worst_case_demand(const Request& request) const;

  // May the leases that have ended on the request's stream keep their pages, although it takes over none or only one of
  // them? `certain`: only if there is room whatever the sizes; else sizes are expected to be what they were the last
  // time, and while a kind is new nothing is kept, so that the high-water mark tells what is needed.
  bool may_keep(const Request& request, std::int64_t capacity, bool certain) const;

  LeaseId start(const Request& request);
  // May be called again, with what the next replay of a graph needed, and of a lease that was taken over.
  void finish(LeaseId id, std::int64_t pages);
  void ending(LeaseId id);    // the last owner is gone
  void flushing(LeaseId id);  // its pages go back as soon as its stream gets there
  void end(LeaseId id);
  // A captured lease may hold its worst case whenever the graph runs, until the graph is gone.
  void unpin(LeaseId id);

  // A step of training ends when no lease has an owner. True once after each step that changed what is known: time to
  // trim.
  bool take_trim_due();
  // Capacity for steady state, in pages, if no graph holds any.
  std::int64_t steady_pages() const { return with_headroom(high_water_); }
  void note_high_water(std::int64_t pages);
  // A lease of this size found no room, so that the mark does not say what was needed: the lease counts on top of it.
  void note_loss(std::int64_t pages);
  // The mark becomes the highest since the last call, if there was any.
  void forget_older_high_water();

  std::int64_t live() const { return live_; }
  std::int64_t high_water() const { return high_water_; }    // without what graphs hold between replays
  std::int64_t known_pages() const { return known_pages_; }  // of leases with an owner
  LeaseId last_id() const { return next_ - 1; }
  bool idle() const { return leases_.empty(); }

 private:
  struct Entry {
    Kind kind;
    std::size_t position;  // live leases when it started
    StreamId stream;
    std::int64_t worst;
    std::int64_t expected;
    std::int64_t pages = -1;  // unknown
    bool owned = true;
    bool pinned = false;
    bool flushing = false;

    std::int64_t bound() const { return pages >= 0 && !pinned ? pages : worst; }
    std::int64_t guess() const { return pages >= 0 ? pages : expected; }
  };
  struct Seen {
    std::int64_t most_pages = 0;
    std::vector<std::int64_t> last_pages;  // by position: in a training step, the same layer's
    bool completed_step = false;
  };
  struct TakenOver {
    Kind kind;
    std::size_t position;
  };

  // More kinds than any training run has; beyond it what was learnt is forgotten, so that random shapes don't add up.
  static constexpr std::size_t kMostKinds = 4096;

  template <class PagesOf>
  std::int64_t sum_at_start(const Request& request, PagesOf pages_of) const;
  template <class PagesOf>
  std::int64_t sum_kept(const Request& request, PagesOf pages_of) const;
  const Entry* taken_over_by(const Request& request) const;
  std::int64_t worst_of(const Request& request) const;
  std::int64_t expected_of(const Request& request) const;
  std::int64_t with_headroom(std::int64_t pages) const;
  void learn(Kind kind, std::size_t position, std::int64_t pages);
  template <class Change>
  void update(Entry& entry, Change change);
  void count(const Entry& entry, std::int64_t sign);

  double headroom_;
  LeaseId next_ = 1;
  ById<Entry> leases_;
  ById<TakenOver> taken_over_;
  std::unordered_map<Kind, Seen> seen_;
  std::vector<Kind> new_kinds_;  // first seen in this step
  std::int64_t live_ = 0;        // leases with an owner
  std::int64_t most_live_ = 0;   // ... at once, in completed steps
  std::int64_t step_most_live_ = 0;
  std::int64_t high_water_ = 0;
  std::int64_t recent_high_water_ = 0;  // since the last forget_older_high_water
  std::int64_t known_pages_ = 0;
  std::int64_t graph_pages_ = 0;  // known ones that graphs hold between replays
  bool trim_due_ = false;
};

}  // namespace bitsparse
