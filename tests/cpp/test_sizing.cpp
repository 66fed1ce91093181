// How large a CUDA arena must be: the host's bookkeeping, which needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "sizing.h"

namespace bitsparse {
namespace {

const int kStreams[3] = {};
const Sizing::StreamId kA = &kStreams[0], kB = &kStreams[1];

Sizing::Request request(Sizing::Kind kind, std::int64_t worst, Sizing::StreamId stream, Sizing::LeaseId takes_over = 0,
                        bool captured = false) {
  return {kind, worst, stream, takes_over, captured};
}

void expect_demand(const Sizing::Demand& got, std::int64_t pages, bool may_wait) {
  EXPECT_EQ(got.pages, pages);
  EXPECT_EQ(got.may_wait, may_wait);
}

TEST(Sizing, WarmUpCountsTheWorstCaseUntilASizeIsKnown) {
  Sizing sizing;
  expect_demand(sizing.demand(request(1, 100, kA)), 100, true);
  const auto first = sizing.start(request(1, 100, kA));
  expect_demand(sizing.demand(request(1, 100, kA)), 200, true);
  sizing.finish(first, 7);
  expect_demand(sizing.demand(request(1, 100, kA)), 107, true);
  EXPECT_EQ(sizing.worst_case_demand(request(1, 100, kA)), 200) << "whatever the size is";
  EXPECT_EQ(sizing.known_pages(), 7);
  const auto second = sizing.start(request(2, 50, kA));
  expect_demand(sizing.demand(request(3, 10, kB)), 67, true);
  sizing.finish(second, 0);
  expect_demand(sizing.demand(request(3, 10, kB)), 17, true);
}

TEST(Sizing, ALeaseThatHasEndedCountsForOtherStreamsOnly) {
  Sizing sizing;
  const auto owned = sizing.start(request(1, 100, kA));  // keeps the step, and so the warm-up, from ending
  const auto lease = sizing.start(request(1, 100, kA));
  sizing.finish(owned, 1);
  sizing.finish(lease, 20);
  EXPECT_EQ(sizing.known_pages(), 21);
  sizing.ending(lease);
  for (int flushing = 0; flushing < 2; ++flushing) {
    expect_demand(sizing.demand(request(1, 100, kA)), 101, true);
    expect_demand(sizing.demand(request(1, 100, kB)), 121, true);
    EXPECT_EQ(sizing.worst_case_demand(request(1, 100, kA)), 200);
    EXPECT_EQ(sizing.worst_case_demand(request(1, 100, kB)), 300);
    EXPECT_EQ(sizing.worst_case_demand(request(1, 100, kA, 0, true)), 300) << "replays are on no stream";
    EXPECT_EQ(sizing.live(), 1);
    EXPECT_EQ(sizing.known_pages(), 1) << "nobody uses the others";
    sizing.flushing(lease);
  }
  sizing.end(lease);
  expect_demand(sizing.demand(request(1, 100, kB)), 101, true);
}

TEST(Sizing, ALeaseThatHasEndedWithUnknownSizeCountsItsWorstCaseForOtherStreams) {
  Sizing sizing;
  sizing.start(request(1, 5, kA));
  const auto lease = sizing.start(request(1, 100, kA));
  sizing.ending(lease);
  expect_demand(sizing.demand(request(1, 10, kA)), 15, true);
  expect_demand(sizing.demand(request(1, 10, kB)), 115, true);
}

TEST(Sizing, ALeaseThatWasTakenOverCountsNowhere) {
  Sizing sizing;
  sizing.start(request(1, 5, kA));
  const auto old = sizing.start(request(1, 100, kA));
  sizing.ending(old);
  expect_demand(sizing.demand(request(1, 90, kA, old)), 105, true);  // may hold 100 until it knows better
  EXPECT_EQ(sizing.worst_case_demand(request(1, 90, kA, old)), 105);
  expect_demand(sizing.demand(request(1, 110, kA, old)), 115, true);
  const auto next = sizing.start(request(1, 90, kA, old));
  expect_demand(sizing.demand(request(1, 10, kB)), 115, true);
  EXPECT_EQ(sizing.live(), 2);
  sizing.finish(old, 70);
  EXPECT_EQ(sizing.known_pages(), 0);
  expect_demand(sizing.demand(request(1, 10, kB)), 115, true);
  sizing.finish(next, 30);
  EXPECT_EQ(sizing.known_pages(), 30);
  expect_demand(sizing.demand(request(1, 10, kB)), 45, true);
  sizing.end(old);
  sizing.finish(old, 70);  // too late to matter
  EXPECT_EQ(sizing.known_pages(), 30);
  sizing.ending(next);
  sizing.end(next);
  expect_demand(sizing.demand(request(1, 10, kB)), 15, true);
}

TEST(Sizing, WhatWasTakenOverIsStillLearntFrom) {
  Sizing sizing(1.0);
  const auto old = sizing.start(request(1, 100, kA));
  sizing.ending(old);
  const auto next = sizing.start(request(1, 100, kA, old));
  sizing.finish(old, 40);
  sizing.finish(next, 10);
  sizing.start(request(1, 100, kA));
  expect_demand(sizing.demand(request(1, 100, kA)), 2 * 40, false);  // two more than ever before
}

// Two leases at once, 3 and 5 pages, 8 in use at the most.
void run_step(Sizing& sizing, Sizing::Kind kind = 1) {
  const auto first = sizing.start(request(kind, 100, kA)), second = sizing.start(request(kind, 100, kA));
  sizing.finish(first, 3);
  sizing.finish(second, 5);
  sizing.note_high_water(8);
  for (auto lease : {second, first}) sizing.ending(lease);
  for (auto lease : {second, first}) sizing.end(lease);
}

TEST(Sizing, SteadyDemandIsTheHighWaterMarkWithHeadroom) {
  Sizing sizing(1.25);
  run_step(sizing);
  EXPECT_TRUE(sizing.idle());
  EXPECT_EQ(sizing.steady_pages(), 10);
  for (Sizing::StreamId stream : {kA, kB}) expect_demand(sizing.demand(request(1, 100, stream)), 10, false);
  sizing.start(request(1, 100, kA));
  expect_demand(sizing.demand(request(1, 100, kA)), 10, false);
  // More at once than any step had: the largest of this kind for each one beyond.
  sizing.start(request(1, 100, kA));
  expect_demand(sizing.demand(request(1, 100, kA)), 15, false);
  sizing.start(request(1, 100, kB));
  expect_demand(sizing.demand(request(1, 100, kA)), 20, false);
}

TEST(Sizing, ANewKindWarmsUpWhileOthersAreSteady) {
  Sizing sizing(1.25);
  run_step(sizing, 1);
  expect_demand(sizing.demand(request(2, 60, kA)), 60, true);
  const auto fresh = sizing.start(request(2, 60, kA));
  expect_demand(sizing.demand(request(2, 60, kA)), 120, true);
  expect_demand(sizing.demand(request(1, 100, kA)), 10, false);
  sizing.finish(fresh, 4);
  sizing.ending(fresh);
  expect_demand(sizing.demand(request(2, 60, kA)), 10, false);
  EXPECT_TRUE(sizing.take_trim_due());
}

TEST(Sizing, TrimIsDueOnceAfterAStepThatBroughtANewKind) {
  Sizing sizing;
  EXPECT_FALSE(sizing.take_trim_due());
  const auto lease = sizing.start(request(1, 100, kA)), other = sizing.start(request(1, 100, kB));
  sizing.ending(lease);
  EXPECT_FALSE(sizing.take_trim_due()) << "the step is not over";
  sizing.ending(other);
  const auto next = sizing.start(request(1, 100, kA));
  EXPECT_FALSE(sizing.take_trim_due()) << "a lease is alive";
  sizing.ending(next);
  EXPECT_TRUE(sizing.take_trim_due());
  EXPECT_FALSE(sizing.take_trim_due());
  run_step(sizing, 1);
  EXPECT_FALSE(sizing.take_trim_due()) << "nothing new";
  run_step(sizing, 2);
  EXPECT_TRUE(sizing.take_trim_due());
}

TEST(Sizing, EndingTwiceIsEndingOnce) {
  Sizing sizing;
  const auto lease = sizing.start(request(1, 100, kA));
  sizing.start(request(1, 100, kA));
  sizing.ending(lease);
  sizing.ending(lease);
  EXPECT_EQ(sizing.live(), 1);
}

TEST(Sizing, ACapturedLeaseCountsItsWorstCaseUntilUnpinned) {
  Sizing sizing;
  sizing.start(request(1, 1, kA));
  const auto lease = sizing.start(request(2, 100, kA, 0, true));
  sizing.finish(lease, 5);
  expect_demand(sizing.demand(request(3, 10, kA)), 111, true);
  sizing.ending(lease);  // its owner is gone, but replays go on
  EXPECT_EQ(sizing.live(), 1);
  expect_demand(sizing.demand(request(3, 10, kA)), 111, true);
  EXPECT_EQ(sizing.worst_case_demand(request(3, 10, kA)), 111);
  // Another one of the same graph on the same slot.
  const auto next = sizing.start(request(2, 80, kA, lease, true));
  expect_demand(sizing.demand(request(3, 10, kA)), 111, true);
  sizing.ending(next);
  sizing.unpin(lease);
  expect_demand(sizing.demand(request(3, 10, kA)), 111, true);
  sizing.unpin(next);
  expect_demand(sizing.demand(request(3, 10, kA)), 11, true);
  sizing.finish(next, 5);
  expect_demand(sizing.demand(request(3, 10, kB)), 16, true);
  sizing.end(next);
  expect_demand(sizing.demand(request(3, 10, kB)), 11, true);
}

TEST(Sizing, SteadyDemandIsOnTopOfWhatGraphsHold) {
  Sizing sizing(1.0);
  run_step(sizing);  // 8 pages
  EXPECT_TRUE(sizing.take_trim_due());
  const auto first = sizing.start(request(1, 100, kA, 0, true));
  expect_demand(sizing.demand(request(1, 100, kA, 0, true)), 8, false);  // the graph alone: 3 and 5
  const auto second = sizing.start(request(1, 100, kA, 0, true));
  sizing.ending(second);
  expect_demand(sizing.demand(request(1, 100, kA)), 8 + 5, false);
  sizing.ending(first);
  expect_demand(sizing.demand(request(1, 100, kA)), 8 + 8, false);
  // A second backward and forward in the same graph takes the slots over.
  expect_demand(sizing.demand(request(1, 100, kA, first, true)), 8, false);
  // What was measured with the graph's pages there is not added to them.
  sizing.finish(first, 4);
  sizing.finish(second, 6);
  sizing.note_high_water(18);
  EXPECT_EQ(sizing.high_water(), 8);
  expect_demand(sizing.demand(request(1, 100, kA)), 18, false);
  sizing.finish(first, 5);  // the next replay
  expect_demand(sizing.demand(request(1, 100, kA)), 19, false);
  sizing.unpin(first);
  expect_demand(sizing.demand(request(1, 100, kA)), 14, false);
}

TEST(Sizing, NothingIsKeptWhileAKindIsNew) {
  Sizing sizing;
  EXPECT_FALSE(sizing.may_keep(request(1, 1, kA), 1000, false));
  const auto lease = sizing.start(request(1, 1, kA));
  sizing.start(request(1, 1, kA));
  sizing.ending(lease);
  EXPECT_FALSE(sizing.may_keep(request(1, 1, kA, lease), 1000, false));
  EXPECT_TRUE(sizing.may_keep(request(1, 1, kA, lease), 2, true)) << "room for the worst is room";
  EXPECT_FALSE(sizing.may_keep(request(1, 1, kA), 2, true));
}

// A step of leases that ended in reverse is expected to repeat itself.
TEST(Sizing, WhatIsKeptMustFitBesideWhatIsExpected) {
  Sizing sizing(1.0);
  run_step(sizing);
  const auto first = sizing.start(request(1, 100, kA)), second = sizing.start(request(1, 100, kA));
  for (auto lease : {second, first}) sizing.ending(lease);
  EXPECT_TRUE(sizing.may_keep(request(1, 100, kA, first), 8, false));
  EXPECT_FALSE(sizing.may_keep(request(1, 100, kA, first), 7, false));
  EXPECT_TRUE(sizing.may_keep(request(1, 100, kA, second), 8, false)) << "5 held until it knows better";
  EXPECT_FALSE(sizing.may_keep(request(1, 100, kA), 10, false)) << "3, 3 and 5";
  EXPECT_TRUE(sizing.may_keep(request(1, 100, kA), 11, false));
  EXPECT_FALSE(sizing.may_keep(request(1, 100, kA, first), 199, true));
  EXPECT_TRUE(sizing.may_keep(request(1, 100, kA, first), 200, true));
  sizing.finish(second, 20);
  EXPECT_FALSE(sizing.may_keep(request(1, 100, kA, first), 22, false));
  EXPECT_TRUE(sizing.may_keep(request(1, 100, kA, first), 23, false));
  EXPECT_TRUE(sizing.may_keep(request(1, 100, kA, first), 120, true));
  sizing.flushing(second);
  EXPECT_TRUE(sizing.may_keep(request(1, 100, kA, first), 3, false)) << "gone before the next lease starts";
  EXPECT_FALSE(sizing.may_keep(request(1, 100, kB), 22, false)) << "may be there still";
}

TEST(Sizing, HighWaterMark) {
  Sizing sizing(1.0);
  EXPECT_EQ(sizing.steady_pages(), 0);
  sizing.note_high_water(9);
  sizing.note_high_water(4);
  EXPECT_EQ(sizing.high_water(), 9);
  EXPECT_EQ(sizing.steady_pages(), 9);
}

TEST(Sizing, TheMarkOfRecentStepsTakesTheOldOnesPlace) {
  Sizing sizing(1.0);
  sizing.forget_older_high_water();
  EXPECT_EQ(sizing.high_water(), 0);
  sizing.note_high_water(9);
  sizing.forget_older_high_water();
  EXPECT_EQ(sizing.high_water(), 9) << "nothing is older";
  sizing.forget_older_high_water();
  EXPECT_EQ(sizing.high_water(), 9) << "nothing is newer";
  sizing.note_high_water(3);
  sizing.note_high_water(4);
  EXPECT_EQ(sizing.steady_pages(), 9);
  sizing.forget_older_high_water();
  EXPECT_EQ(sizing.steady_pages(), 4);
  sizing.note_high_water(6);
  EXPECT_EQ(sizing.steady_pages(), 6);
}

TEST(Sizing, WhatWasLostCountsAsNeeded) {
  Sizing sizing(1.0);
  run_step(sizing);  // 8 pages
  sizing.note_loss(7);
  sizing.note_loss(5);
  EXPECT_EQ(sizing.high_water(), 20);
  expect_demand(sizing.demand(request(1, 100, kA)), 20, false);
  sizing.note_high_water(18);
  sizing.forget_older_high_water();
  EXPECT_EQ(sizing.high_water(), 20);
  sizing.note_high_water(12);
  sizing.forget_older_high_water();
  EXPECT_EQ(sizing.high_water(), 12);
}

// Random work on three streams against a model that knows what each stream still has to run. A stream runs its work in
// order, and streams run in any order to one another: so what is in use at the most is, stream by stream, the most
// after any number of the stream's next operations. The host sees sizes and ends of leases late and in any order.
class Machine {
 public:
  explicit Machine(std::uint64_t seed) : rng_(seed) {}

  void run(int operations) {
    always_new_ = pick(2) == 0;
    bounded_ = always_new_ && pick(3) == 0;
    certain_ = bounded_ || pick(2) == 0;
    waits_ = pick(2) == 0;
    int most = 1 + pick(20);
    for (int i = 0; i < operations && !::testing::Test::HasFailure(); ++i) {
      if (pick(200) == 0) most = 1 + pick(20);
      switch (pick(8)) {
        case 0:
        case 1:
          if (live() < most && static_cast<int>(leases_.size()) < 3 * most) start();
          break;
        case 2:
        case 3: drop(live() >= most && pick(4) == 0); break;
        case 4:
        case 5: advance(); break;
        case 6: poll(); break;
        default: rare();
      }
      check_counts();
    }
    drain();
  }

 private:
  struct Lease {
    Sizing::Kind kind;
    std::int64_t worst, actual, expected, position;
    int stream;
    Sizing::LeaseId before = 0, after = 0;      // whose slot it took over, and who took over its own
    bool compressed = false, returned = false;  // on the device
    bool owned = true, known = false, pinned = false, flushing = false;
  };
  struct Operation {
    Sizing::LeaseId id;
    bool flush;
  };
  struct KindState {
    std::int64_t most_pages = 0;
    std::map<std::int64_t, std::int64_t> last_pages;  // by the live leases at the start
    bool completed_step = false, started = false;
  };

  int pick(int n) { return static_cast<int>(rng_() % static_cast<std::uint64_t>(n)); }

  template <class Predicate>
  Sizing::LeaseId any(Predicate wanted) {
    std::vector<Sizing::LeaseId> found;
    for (const auto& [id, lease] : leases_)
      if (wanted(lease)) found.push_back(id);
    return found.empty() ? 0 : found[static_cast<std::size_t>(pick(static_cast<int>(found.size())))];
  }

  static bool is_warm(const Lease& lease) { return !lease.owned && !lease.pinned && !lease.after && !lease.flushing; }

  // As far as the host can know. A captured lease holds its worst case from its place in the stream on: the graph is
  // run there, again and again.
  static std::int64_t size_of(const Lease& lease) { return lease.known && !lease.pinned ? lease.actual : lease.worst; }

  // Most in use on `stream` from now on.
  std::int64_t stream_most(int stream) const {
    std::map<Sizing::LeaseId, std::int64_t> holds;  // by who has the slot
    std::int64_t now = 0;
    const auto set = [&](Sizing::LeaseId id, std::int64_t pages) {
      now += pages - holds[id];
      holds[id] = pages;
    };
    for (const auto& [id, lease] : leases_) {
      const auto after = leases_.find(lease.after);
      const bool has_slot = after == leases_.end() ? !lease.after : !after->second.compressed;
      if (lease.stream == stream && lease.compressed && !lease.returned && has_slot) set(id, size_of(lease));
    }
    std::int64_t most = now;
    for (const Operation& operation : queues_[stream]) {
      const Lease& lease = leases_.at(operation.id);
      if (operation.flush) {
        set(operation.id, 0);
        continue;
      }
      const std::int64_t found = lease.before ? holds[lease.before] : 0;
      if (lease.before) set(lease.before, 0);
      set(operation.id, std::max(found, size_of(lease)));
      most = std::max(most, now);
      set(operation.id, size_of(lease));
    }
    return most;
  }
  std::int64_t most() const {
    std::int64_t sum = 0;
    for (int s = 0; s < 3; ++s) sum += stream_most(s);
    return sum;
  }
  // When a lease starts on `stream` and what has ended there holds nothing.
  std::int64_t most_with(const Sizing::Request& request, int stream) const {
    std::int64_t sum = request.worst;
    if (request.takes_over) sum = std::max(sum, size_of(leases_.at(request.takes_over)));
    for (const auto& [id, lease] : leases_)
      if (lease.stream == stream && (lease.owned || lease.pinned)) sum += size_of(lease);
    for (int s = 0; s < 3; ++s)
      if (s != stream) sum += stream_most(s);
    return sum;
  }

  template <class Predicate>
  void flush(Predicate wanted) {
    for (auto& [id, lease] : leases_) {
      if (!is_warm(lease) || !wanted(id, lease)) continue;
      lease.flushing = true;
      sizing_.flushing(id);
      queues_[lease.stream].push_back({id, true});
    }
  }

  std::int64_t expected(const KindState& state, std::int64_t worst) const {
    if (state.last_pages.empty()) return worst;
    const auto last = state.last_pages.find(live());
    return last == state.last_pages.end() ? state.most_pages : last->second;
  }

  // As an arena begins a lease.
  void start() {
    const int stream = pick(3);
    const Sizing::Kind kind = always_new_ ? ++last_kind_ : static_cast<Sizing::Kind>(pick(6));
    Sizing::Request request{kind, 1 + pick(1000), &kStreams[stream], 0, pick(30) == 0};
    flush([&](Sizing::LeaseId, const Lease& lease) { return request.captured || lease.stream != stream; });
    if (!request.captured && pick(4) > 0)
      request.takes_over = any([&](const Lease& lease) { return is_warm(lease) && lease.stream == stream; });

    Sizing::Demand demand = sizing_.demand(request);
    KindState& state = kinds_[kind];
    ASSERT_EQ(demand.may_wait, !state.completed_step);
    ASSERT_GE(sizing_.worst_case_demand(request), most_with(request, stream));
    if (bounded_) {
      capacity_ = std::max(capacity_, sizing_.worst_case_demand(request));
    } else if (demand.may_wait) {
      ASSERT_GE(demand.pages, most_with(request, stream));
      while (waits_ && demand.pages > capacity_ && wait_for_oldest()) {
        const Sizing::Demand less = sizing_.demand(request);
        ASSERT_LE(less.pages, demand.pages) << "knowing more asked for more";
        ASSERT_GE(less.pages, most_with(request, stream));
        demand = less;
      }
      capacity_ = std::max(capacity_, demand.pages);
    } else if (!request.captured) {
      std::int64_t graphs = 0;
      for (const auto& [id, lease] : leases_)
        if (lease.pinned && !lease.owned) graphs += lease.known ? lease.actual : lease.expected;
      const std::int64_t beyond = std::max<std::int64_t>(0, live() + 1 - most_live_);
      ASSERT_EQ(demand.pages, with_headroom(high_water_ + graphs) + beyond * state.most_pages);
    }
    const bool keep = sizing_.may_keep(request, capacity_, certain_);
    ASSERT_TRUE(certain_ || state.completed_step || !keep);
    if (!request.takes_over || !keep)
      flush([&](Sizing::LeaseId id, const Lease& lease) { return lease.stream == stream && id != request.takes_over; });

    const Sizing::LeaseId id = sizing_.start(request);
    ASSERT_EQ(leases_.count(id), 0u);
    Lease lease{};
    lease.kind = kind;
    lease.worst = request.worst;
    lease.actual = pick(static_cast<int>(request.worst) + 1);
    lease.expected = expected(state, request.worst);
    lease.position = live();
    lease.stream = stream;
    lease.before = request.takes_over;
    lease.pinned = request.captured;
    if (lease.before) leases_[lease.before].after = id;
    leases_[id] = lease;
    queues_[stream].push_back({id, false});
    if (!state.started) new_in_step_.push_back(kind);
    state.started = true;
    step_most_live_ = std::max(step_most_live_, live());
    if (always_new_) {
      ASSERT_GE(capacity_, most()) << "room that was never asked for is in use";
    }
  }

  void drop(bool all) {
    do {
      const Sizing::LeaseId id = any([](const Lease& l) { return l.owned; });
      if (!id) return;
      leases_[id].owned = false;
      sizing_.ending(id);
      if (live() > 0) continue;
      most_live_ = std::max(most_live_, step_most_live_);
      step_most_live_ = 0;
      trim_due_ = trim_due_ || !new_in_step_.empty();
      for (Sizing::Kind kind : new_in_step_) kinds_[kind].completed_step = true;
      new_in_step_.clear();
    } while (all);
  }

  void advance_on(int stream) {
    if (queues_[stream].empty()) return;
    const Operation operation = queues_[stream].front();
    queues_[stream].pop_front();
    Lease& lease = leases_.at(operation.id);
    (operation.flush ? lease.returned : lease.compressed) = true;
  }
  void advance() {
    const int stream = pick(3);
    for (int n = 1 + pick(4); n > 0; --n) advance_on(stream);
  }

  void see_size(Sizing::LeaseId id) {
    Lease& lease = leases_.at(id);
    lease.known = true;
    sizing_.finish(id, lease.actual);
    KindState& state = kinds_[lease.kind];
    state.most_pages = std::max(state.most_pages, lease.actual);
    state.last_pages[lease.position] = lease.actual;
  }
  void poll() {
    for (auto next = leases_.begin(); next != leases_.end();) {
      auto& [id, lease] = *next;
      if (lease.compressed && !lease.known && pick(3) > 0) see_size(id);
      const auto after = leases_.find(lease.after);
      const bool over = lease.returned || (after != leases_.end() && after->second.compressed);
      const bool seen = over && lease.known && !leases_.count(lease.before) && pick(3) > 0;
      if (seen) sizing_.end(id);
      next = seen ? leases_.erase(next) : std::next(next);
    }
  }
  bool wait_for_oldest() {
    for (auto& [id, lease] : leases_) {
      if (lease.known || lease.after) continue;
      while (!lease.compressed) advance_on(lease.stream);
      see_size(id);
      return true;
    }
    return false;
  }

  void rare() {
    switch (pick(7)) {
      case 0:
        if (const auto id = any([](const Lease& l) { return l.pinned; })) {
          sizing_.unpin(id);
          leases_[id].pinned = false;
        }
        break;
      case 1: {
        const std::int64_t pages = pick(5000);
        std::int64_t graphs = 0;
        for (const auto& [id, lease] : leases_)
          if (lease.pinned && !lease.owned && lease.known) graphs += lease.actual;
        recent_high_water_ = std::max<std::int64_t>(recent_high_water_, pages - graphs);
        high_water_ = std::max(high_water_, recent_high_water_);
        sizing_.note_high_water(pages);
        sizing_.note_high_water(pages / 2);
        break;
      }
      case 2: {
        const bool due = trim_due_ && live() == 0;
        ASSERT_EQ(sizing_.take_trim_due(), due);
        if (due) trim_due_ = false;
        break;
      }
      case 3:
        if (pick(10) == 0) drop(true);
        break;
      case 4:
        sizing_.forget_older_high_water();
        if (recent_high_water_ > 0) high_water_ = std::exchange(recent_high_water_, 0);
        break;
      case 5:
        if (pick(10) > 0) break;
        high_water_ += 17;
        recent_high_water_ = high_water_;
        sizing_.note_loss(17);
        break;
      default:
        if (pick(10) == 0) drain();
    }
  }

  // Everything ends and the host sees it.
  void drain() {
    drop(true);
    for (auto& [id, lease] : leases_) {
      if (lease.pinned) sizing_.unpin(id);
      lease.pinned = false;
    }
    flush([](Sizing::LeaseId, const Lease&) { return true; });
    for (int stream = 0; stream < 3; ++stream) {
      while (!queues_[stream].empty()) advance_on(stream);
    }
    for (auto& [id, lease] : leases_) {
      if (!lease.known) see_size(id);
      sizing_.end(id);
    }
    leases_.clear();
    ASSERT_TRUE(sizing_.idle());
    ASSERT_EQ(sizing_.known_pages(), 0);
    ASSERT_EQ(sizing_.live(), 0);
    capacity_ = 0;  // as after a trim
  }

  std::int64_t live() const {
    return std::count_if(leases_.begin(), leases_.end(), [](const auto& item) { return item.second.owned; });
  }
  static std::int64_t with_headroom(std::int64_t pages) {
    return static_cast<std::int64_t>(std::ceil(static_cast<double>(pages) * 1.15));
  }

  void check_counts() {
    std::int64_t known = 0;
    for (const auto& [id, lease] : leases_) known += lease.known && lease.owned ? lease.actual : 0;
    ASSERT_EQ(sizing_.known_pages(), known);
    ASSERT_EQ(sizing_.live(), live());
    ASSERT_EQ(sizing_.idle(),
              std::all_of(leases_.begin(), leases_.end(), [](const auto& l) { return l.second.after; }));
    ASSERT_EQ(sizing_.high_water(), high_water_);
  }

  std::mt19937_64 rng_;
  Sizing sizing_;
  bool always_new_ = false, bounded_ = false, certain_ = false, waits_ = false, trim_due_ = false;
  std::map<Sizing::LeaseId, Lease> leases_;  // by age
  std::deque<Operation> queues_[3];
  std::map<Sizing::Kind, KindState> kinds_;
  std::vector<Sizing::Kind> new_in_step_;
  Sizing::Kind last_kind_ = 0;
  std::int64_t high_water_ = 0, recent_high_water_ = 0, most_live_ = 0, step_most_live_ = 0;
  std::int64_t capacity_ = 0;
};

TEST(Sizing, RandomWorkOnThreeStreams) {
  const char* given = std::getenv("BITSPARSE_TEST_SEED");
  const std::uint64_t first = given ? std::stoull(given) : std::random_device{}();
  std::cout << "BITSPARSE_TEST_SEED=" << first << std::endl;
  for (std::uint64_t seed = first; seed < first + 200; ++seed) {
    SCOPED_TRACE("BITSPARSE_TEST_SEED=" + std::to_string(seed));
    Machine(seed).run(2000);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace bitsparse
