// How large a CUDA arena must be: the host's bookkeeping, which needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "sizing.h"

namespace bitsparse {
namespace {

const int kStreams[3] = {};
const Sizing::StreamId kA = &kStreams[0], kB = &kStreams[1];

void expect_demand(const Sizing::Demand& got, std::int64_t pages, bool may_wait) {
  EXPECT_EQ(got.pages, pages);
  EXPECT_EQ(got.may_wait, may_wait);
}

TEST(Sizing, WarmUpCountsTheWorstCaseUntilASizeIsKnown) {
  Sizing sizing;
  expect_demand(sizing.demand(1, 100, kA), 100, true);
  const auto first = sizing.start(1, 100, kA);
  expect_demand(sizing.demand(1, 100, kA), 200, true);
  sizing.finish(first, 7);
  expect_demand(sizing.demand(1, 100, kA), 107, true);
  EXPECT_EQ(sizing.worst_case_demand(100, kA), 200) << "whatever the size is";
  EXPECT_EQ(sizing.known_pages(), 7);
  const auto second = sizing.start(2, 50, kA);
  expect_demand(sizing.demand(3, 10, kB), 67, true);
  sizing.finish(second, 0);
  expect_demand(sizing.demand(3, 10, kB), 17, true);
}

TEST(Sizing, AnEndingLeaseCountsForOtherStreamsOnly) {
  Sizing sizing;
  const auto owned = sizing.start(1, 100, kA);  // keeps the step, and so the warm-up, from ending
  const auto lease = sizing.start(1, 100, kA);
  sizing.finish(owned, 1);
  sizing.finish(lease, 20);
  sizing.ending(lease);
  expect_demand(sizing.demand(1, 100, kA), 101, true);
  expect_demand(sizing.demand(1, 100, kB), 121, true);
  EXPECT_EQ(sizing.worst_case_demand(100, kA), 200);
  EXPECT_EQ(sizing.worst_case_demand(100, kB), 300);
  EXPECT_EQ(sizing.live(), 1);
  EXPECT_EQ(sizing.known_pages(), 21) << "in use until the pages are seen back";
  sizing.end(lease);
  expect_demand(sizing.demand(1, 100, kB), 101, true);
  EXPECT_EQ(sizing.known_pages(), 1);
}

TEST(Sizing, AnEndingLeaseOfUnknownSizeCountsItsWorstCaseForOtherStreams) {
  Sizing sizing;
  sizing.start(1, 5, kA);
  const auto lease = sizing.start(1, 100, kA);
  sizing.ending(lease);
  expect_demand(sizing.demand(1, 10, kA), 15, true);
  expect_demand(sizing.demand(1, 10, kB), 115, true);
}

// Two leases at once, 3 and 5 pages, 8 in use at the most.
void run_step(Sizing& sizing, Sizing::Kind kind = 1) {
  const auto first = sizing.start(kind, 100, kA), second = sizing.start(kind, 100, kA);
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
  for (Sizing::StreamId stream : {kA, kB}) expect_demand(sizing.demand(1, 100, stream), 10, false);
  sizing.start(1, 100, kA);
  expect_demand(sizing.demand(1, 100, kA), 10, false);
  // More at once than any step had: the largest of this kind for each one beyond.
  sizing.start(1, 100, kA);
  expect_demand(sizing.demand(1, 100, kA), 15, false);
  sizing.start(1, 100, kB);
  expect_demand(sizing.demand(1, 100, kA), 20, false);
}

TEST(Sizing, ANewKindWarmsUpWhileOthersAreSteady) {
  Sizing sizing(1.25);
  run_step(sizing, 1);
  expect_demand(sizing.demand(2, 60, kA), 60, true);
  const auto fresh = sizing.start(2, 60, kA);
  expect_demand(sizing.demand(2, 60, kA), 120, true);
  expect_demand(sizing.demand(1, 100, kA), 10, false);
  sizing.finish(fresh, 4);
  sizing.ending(fresh);
  expect_demand(sizing.demand(2, 60, kA), 10, false);
  EXPECT_TRUE(sizing.take_trim_due());
}

TEST(Sizing, TrimIsDueOnceAfterAStepThatBroughtANewKind) {
  Sizing sizing;
  EXPECT_FALSE(sizing.take_trim_due());
  const auto lease = sizing.start(1, 100, kA), other = sizing.start(1, 100, kB);
  sizing.ending(lease);
  EXPECT_FALSE(sizing.take_trim_due()) << "the step is not over";
  sizing.ending(other);
  const auto next = sizing.start(1, 100, kA);
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
  const auto lease = sizing.start(1, 100, kA);
  sizing.start(1, 100, kA);
  sizing.ending(lease);
  sizing.ending(lease);
  EXPECT_EQ(sizing.live(), 1);
}

TEST(Sizing, APinnedLeaseCountsItsWorstCaseUntilUnpinned) {
  Sizing sizing;
  sizing.start(1, 1, kA);
  const auto lease = sizing.start(2, 100, kA);
  sizing.pin(lease);
  sizing.finish(lease, 5);
  expect_demand(sizing.demand(3, 10, kA), 111, true);
  sizing.ending(lease);  // its owner is gone, but replays go on
  EXPECT_EQ(sizing.live(), 1);
  expect_demand(sizing.demand(3, 10, kA), 111, true);
  EXPECT_EQ(sizing.worst_case_demand(10, kA), 111);
  sizing.unpin(lease);
  expect_demand(sizing.demand(3, 10, kA), 11, true);
  expect_demand(sizing.demand(3, 10, kB), 16, true);
  sizing.end(lease);
  expect_demand(sizing.demand(3, 10, kB), 11, true);
}

TEST(Sizing, ExpectsWhatTheLeaseOfThatPositionTookLast) {
  Sizing sizing;
  EXPECT_EQ(sizing.expected_pages(1), 0);
  run_step(sizing, 1);
  EXPECT_EQ(sizing.expected_pages(1), 3);
  EXPECT_EQ(sizing.expected_pages(2), 0) << "another kind";
  const auto first = sizing.start(1, 100, kA);
  EXPECT_EQ(sizing.expected_pages(1), 5);
  const auto second = sizing.start(1, 100, kA);
  EXPECT_EQ(sizing.expected_pages(1), 0) << "no lease was ever the third";
  sizing.finish(second, 9);
  sizing.finish(first, 2);
  for (auto lease : {first, second}) sizing.ending(lease);
  EXPECT_EQ(sizing.expected_pages(1), 2);
  sizing.start(1, 100, kA);
  EXPECT_EQ(sizing.expected_pages(1), 9);
}

TEST(Sizing, HighWaterMark) {
  Sizing sizing(1.0);
  EXPECT_EQ(sizing.steady_pages(), 0);
  sizing.note_high_water(9);
  sizing.note_high_water(4);
  EXPECT_EQ(sizing.high_water(), 9);
  EXPECT_EQ(sizing.steady_pages(), 9);
}

// Random work on three streams against a model that knows what each stream still has to run. A stream runs its work in
// order, and streams run in any order to one another: so what is in use at the most is, stream by stream, the most
// after any number of the stream's next operations. The host sees sizes and ends of leases late and in any order.
class Machine {
 public:
  explicit Machine(std::uint64_t seed) : rng_(seed) {}

  void run(int operations) {
    always_new_ = pick(2) == 0;
    waits_ = pick(2) == 0;
    int most = 1 + pick(20);
    for (int i = 0; i < operations && !::testing::Test::HasFailure(); ++i) {
      if (pick(200) == 0) most = 1 + pick(20);
      switch (pick(8)) {
        case 0:
        case 1:
          if (static_cast<int>(leases_.size()) < most) start();
          break;
        case 2:
        case 3: drop(static_cast<int>(leases_.size()) >= most && pick(4) == 0); break;
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
    std::int64_t worst, actual, position;
    int stream;
    bool compressed = false, released = false;  // on the device
    bool owned = true, known = false, pinned = false;
  };
  struct Operation {
    Sizing::LeaseId id;
    bool release;
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

  // As far as the host can know.
  static std::int64_t size_of(const Lease& lease) { return lease.known ? lease.actual : lease.worst; }
  static std::int64_t worst_of(const Lease& lease) { return lease.worst; }

  // Most in use on `stream` from now on, or once all of its work has run.
  template <class Size>
  std::int64_t stream_most(int stream, bool all_has_run, Size size) const {
    // A captured lease holds its worst case from its place in the stream on: the graph is run there, again and again.
    std::int64_t now = 0;
    for (const auto& [id, lease] : leases_) {
      if (lease.stream != stream || !lease.compressed) continue;
      if (lease.pinned)
        now += lease.worst;
      else if (!lease.released)
        now += size(lease);
    }
    std::int64_t most = now;
    for (const Operation& operation : queues_[stream]) {
      const Lease& lease = leases_.at(operation.id);
      const std::int64_t pages = lease.pinned ? lease.worst : size(lease);
      if (!operation.release)
        now += pages;
      else if (!lease.pinned)
        now -= pages;
      most = std::max(most, now);
    }
    return all_has_run ? now : most;
  }
  template <class Size>
  std::int64_t most_with(std::int64_t worst, int stream, Size size) const {
    std::int64_t sum = worst;
    for (int s = 0; s < 3; ++s) sum += stream_most(s, s == stream, size);
    return sum;
  }
  template <class Size>
  std::int64_t most(Size size) const {
    std::int64_t sum = 0;
    for (int s = 0; s < 3; ++s) sum += stream_most(s, false, size);
    return sum;
  }

  void start() {
    const int stream = pick(3);
    const Sizing::Kind kind = always_new_ ? ++last_kind_ : static_cast<Sizing::Kind>(pick(6));
    const std::int64_t worst = 1 + pick(1000);
    Sizing::Demand demand = sizing_.demand(kind, worst, &kStreams[stream]);
    KindState& state = kinds_[kind];
    ASSERT_EQ(demand.may_wait, !state.completed_step);
    ASSERT_GE(sizing_.worst_case_demand(worst, &kStreams[stream]), most_with(worst, stream, worst_of));
    worst_case_capacity_ = std::max(worst_case_capacity_, sizing_.worst_case_demand(worst, &kStreams[stream]));
    if (demand.may_wait) {
      ASSERT_GE(demand.pages, most_with(worst, stream, size_of));
      while (waits_ && demand.pages > capacity_ && wait_for_oldest()) {
        const Sizing::Demand less = sizing_.demand(kind, worst, &kStreams[stream]);
        ASSERT_LE(less.pages, demand.pages) << "knowing more asked for more";
        ASSERT_GE(less.pages, most_with(worst, stream, size_of));
        demand = less;
      }
      capacity_ = std::max(capacity_, demand.pages);
    } else {
      const auto steady = static_cast<std::int64_t>(std::ceil(static_cast<double>(high_water_) * 1.15));
      const std::int64_t beyond = std::max<std::int64_t>(0, live() + 1 - most_live_);
      ASSERT_EQ(demand.pages, steady + beyond * state.most_pages);
    }
    const auto last = state.last_pages.find(live());
    ASSERT_EQ(sizing_.expected_pages(kind), last == state.last_pages.end() ? 0 : last->second);

    const Sizing::LeaseId id = sizing_.start(kind, worst, &kStreams[stream]);
    ASSERT_EQ(leases_.count(id), 0u);
    Lease lease{};
    lease.kind = kind;
    lease.worst = worst;
    lease.actual = pick(static_cast<int>(worst) + 1);
    lease.position = live();
    lease.stream = stream;
    leases_[id] = lease;
    queues_[stream].push_back({id, false});
    if (!state.started) new_in_step_.push_back(kind);
    state.started = true;
    step_most_live_ = std::max(step_most_live_, live());
    if (pick(30) == 0) {
      sizing_.pin(id);
      leases_[id].pinned = true;
    }
    if (always_new_) {
      ASSERT_GE(capacity_, most(size_of)) << "room that was never asked for is in use";
    }
    ASSERT_GE(worst_case_capacity_, most(worst_of));
  }

  void drop(bool all) {
    do {
      const Sizing::LeaseId id = any([](const Lease& l) { return l.owned; });
      if (!id) return;
      Lease& lease = leases_[id];
      lease.owned = false;
      sizing_.ending(id);
      queues_[lease.stream].push_back({id, true});
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
    (operation.release ? lease.released : lease.compressed) = true;
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
      const bool seen = lease.released && lease.known && !lease.pinned && pick(3) > 0;
      if (seen) sizing_.end(id);
      next = seen ? leases_.erase(next) : std::next(next);
    }
  }
  bool wait_for_oldest() {
    for (auto& [id, lease] : leases_) {
      if (lease.known) continue;
      while (!lease.compressed) advance_on(lease.stream);
      see_size(id);
      return true;
    }
    return false;
  }

  void rare() {
    switch (pick(5)) {
      case 0:
        if (const auto id = any([](const Lease& l) { return l.pinned; })) {
          sizing_.unpin(id);
          leases_[id].pinned = false;
        }
        break;
      case 1:
        high_water_ = std::max<std::int64_t>(high_water_, pick(5000));
        sizing_.note_high_water(high_water_);
        sizing_.note_high_water(high_water_ / 2);
        break;
      case 2: {
        const bool due = trim_due_ && live() == 0;
        ASSERT_EQ(sizing_.take_trim_due(), due);
        if (due) trim_due_ = false;
        break;
      }
      case 3:
        if (pick(10) == 0) drop(true);
        break;
      default:
        if (pick(10) == 0) drain();
    }
  }

  // Everything ends and the host sees it.
  void drain() {
    drop(true);
    for (int stream = 0; stream < 3; ++stream) {
      while (!queues_[stream].empty()) advance_on(stream);
    }
    for (auto& [id, lease] : leases_) {
      if (lease.pinned) sizing_.unpin(id);
      if (!lease.known) see_size(id);
      sizing_.end(id);
    }
    leases_.clear();
    ASSERT_TRUE(sizing_.idle());
    ASSERT_EQ(sizing_.known_pages(), 0);
    ASSERT_EQ(sizing_.live(), 0);
    capacity_ = worst_case_capacity_ = 0;  // as after a trim
  }

  std::int64_t live() const {
    return std::count_if(leases_.begin(), leases_.end(), [](const auto& item) { return item.second.owned; });
  }

  void check_counts() {
    std::int64_t known = 0;
    for (const auto& [id, lease] : leases_) known += lease.known ? lease.actual : 0;
    ASSERT_EQ(sizing_.known_pages(), known);
    ASSERT_EQ(sizing_.live(), live());
    ASSERT_EQ(sizing_.idle(), leases_.empty());
    ASSERT_EQ(sizing_.high_water(), high_water_);
  }

  std::mt19937_64 rng_;
  Sizing sizing_;
  bool always_new_ = false, waits_ = false, trim_due_ = false;
  std::map<Sizing::LeaseId, Lease> leases_;  // by age
  std::deque<Operation> queues_[3];
  std::map<Sizing::Kind, KindState> kinds_;
  std::vector<Sizing::Kind> new_in_step_;
  Sizing::Kind last_kind_ = 0;
  std::int64_t high_water_ = 0, most_live_ = 0, step_most_live_ = 0;
  std::int64_t capacity_ = 0, worst_case_capacity_ = 0;
};

TEST(Sizing, RandomWorkOnThreeStreams) {
  const char* given = std::getenv("BITSPARSE_TEST_SEED");
  const std::uint64_t first = given ? std::stoull(given) : std::random_device{}();
  for (std::uint64_t seed = first; seed < first + 200; ++seed) {
    SCOPED_TRACE("BITSPARSE_TEST_SEED=" + std::to_string(seed));
    Machine(seed).run(2000);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace bitsparse
