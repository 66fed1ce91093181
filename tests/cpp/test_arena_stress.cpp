// Random work on arenas against a simple model: compress, read, release, hand over to another thread, trim, statistics,
// graph replays, on several streams. What is restored is compared on the device with what dense code gives; what the
// arena says about itself is compared with sums over the leases that are alive. BITSPARSE_TEST_SEED repeats a run.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bitsparse/arena.h"
#include "bitsparse/error.h"
#include "gpu.h"
#include "lease.h"
#ifdef BITSPARSE_WITH_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace bitsparse {
namespace {

constexpr std::int64_t kPage = 512 << 10;
constexpr std::size_t kMostLive = 12;

struct Input {
  at::Tensor h, relu;
  Codec codec;
  std::int64_t in_use, payload, dense;  // what a lease of it adds to the arena's statistics
};

at::Tensor bits_of(const at::Tensor& t) { return t.view(t.element_size() == 2 ? at::kShort : at::kInt); }

// The given share is positive; the rest is negative.
Input make_input(c10::Device device, std::int64_t n, at::ScalarType type, double density, Codec codec,
                 std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<float> h(static_cast<std::size_t>(n)), relu(h.size());
  for (std::size_t i = 0; i < h.size(); ++i) {
    const auto random = rng();
    const float magnitude = static_cast<float>((random >> 8) % 255 + 1) / static_cast<float>(1 << random % 8);
    const bool positive = static_cast<double>((random >> 20) % 100'000) < density * 100'000;
    h[i] = positive ? magnitude : -magnitude;
    relu[i] = positive ? magnitude : 0.0f;
  }
  const auto there = [&](std::vector<float>& values) {
    return at::from_blob(values.data(), {n}, at::kFloat).to(type).to(device, type, /*non_blocking=*/false, true);
  };
  Input input{there(h), there(relu), codec, 0, 0, n * static_cast<std::int64_t>(c10::elementSize(type))};
  ArenaOptions options;
  options.worst_case = true;
  const auto arena = Arena::create(device, options);
  const at::Tensor handle = arena->compress(input.h, at::empty_like(input.h), codec, Activation::relu);
  const MemoryStats stats = arena->memory_stats(true);
  input.in_use = stats.in_use;
  input.payload = stats.payload_bytes;
  return input;
}

// The first five are of one shape, for graphs.
constexpr std::size_t kGraphInputs = 5;
std::vector<Input> make_inputs(c10::Device device) {
  const std::int64_t less = device.is_cuda() ? 1 : 10;  // by so many times
  std::vector<Input> inputs;
  std::uint64_t seed = 1;
  for (double density : {0.0, 0.02, 0.3, 0.9, 1.0})
    inputs.push_back(make_input(device, 600'001 / less, at::kBFloat16, density, Codec::tight, seed++));
  for (double density : {0.05, 0.4, 1.0})
    inputs.push_back(make_input(device, 250'000 / less, at::kFloat, density, Codec::raw, seed++));
  for (std::int64_t n : {0, 1, 1000, 70'000})
    inputs.push_back(make_input(device, n, at::kHalf, 0.5, Codec::signless, seed++));
  return inputs;
}

struct Held {
  at::Tensor handle;
  std::size_t input;
  std::shared_ptr<c10::Event> compressed;  // null on a CPU
};

// Leases on their way from one thread to another.
class Mailbox {
 public:
  void put(Held lease) {
    std::lock_guard<std::mutex> lock(mutex_);
    leases_.push_back(std::move(lease));
  }
  std::optional<Held> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (leases_.empty()) return std::nullopt;
    Held lease = std::move(leases_.back());
    leases_.pop_back();
    return lease;
  }

 private:
  std::mutex mutex_;
  std::vector<Held> leases_;
};

struct Case {
  const char* name;
  ArenaOptions options;
  bool loses = false;       // tiles may be lost: NaN then, and OutOfArenaMemory
  bool spills = true;       // may use the spill region
  bool never_waits = true;  // nor does the host have to
};

// Work of one thread.
class Machine {
 public:
  Machine(std::shared_ptr<Arena> arena, const Case& rules, const std::vector<Input>& inputs, std::uint64_t seed,
          Mailbox* mailbox = nullptr)
      : arena_(std::move(arena)), rules_(rules), inputs_(inputs), rng_(seed), mailbox_(mailbox) {
    const c10::Device device = arena_->device();
    for (int i = 0; i < (device.is_cuda() ? 3 : 1); ++i) {
      Lane lane;
      if (device.is_cuda()) lane.stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
      const c10::OptionalStreamGuard guard(lane.stream);
      lane.wrong = at::zeros({1}, at::TensorOptions().device(device).dtype(at::kLong));
      lane.lost = at::zeros_like(lane.wrong);
      lanes_.push_back(std::move(lane));
    }
  }

  void run(int operations) {
    for (int i = 0; i < operations && !::testing::Test::HasFailure(); ++i) {
      try {
        step();
      } catch (const c10::OutOfMemoryError& error) {
        ++errors_;
        ASSERT_TRUE(rules_.loses) << error.what_without_backtrace();
        ASSERT_NE(dynamic_cast<const OutOfArenaMemory*>(&error), nullptr) << error.what_without_backtrace();
      }
    }
  }

  // Ends everything; then nothing is in use, and what was restored was right.
  void finish() {
    live_.clear();
    if (drop_graphs())
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // CUDA tells the arena in its own time
    synchronize_and_note_failure();
    for (Lane& lane : lanes_) {
      EXPECT_EQ(lane.wrong.item<std::int64_t>(), 0) << "restored tensors with elements neither exact nor NaN";
      const auto lost = lane.lost.item<std::int64_t>();
      EXPECT_TRUE(rules_.loses || lost == 0) << lost << " restored tensors with NaN";
      lost_ += lost;
    }
  }

  std::int64_t compressed() const { return compressed_; }
  std::int64_t reads() const { return reads_; }
  std::int64_t lost() const { return lost_; }
  std::int64_t errors() const { return errors_; }

 private:
  struct Lane {
    std::optional<c10::Stream> stream;
    at::Tensor wrong, lost;  // numbers of restored tensors
  };

  std::size_t pick(std::size_t n) { return static_cast<std::size_t>(rng_() % n); }

  void step() {
    const std::size_t what = pick(100);
    if (what < 36) {
      if (live_.size() < kMostLive) return compress(pick(lanes_.size()), pick(inputs_.size()));
      return release();
    }
    if (what < 64) return read();
    if (what < 92) return release();
    if (what < 95) return hand_over();
    if (what < 98) return check_statistics(false);
    rare();
  }

  void rare() {
    switch (pick(mailbox_ ? 12 : 16)) {
      case 0: return arena_->trim();
      case 1: return arena_->reset_peak_memory_stats();
      case 2: return check_statistics(true);
      case 3: {  // the end of a training step
        live_.clear();
        if (pick(2)) arena_->trim();
        return;
      }
      case 4: {  // one as training is: leases end in reverse
        live_.clear();
        const std::size_t lane = pick(lanes_.size());
        for (std::size_t i = 0; i < 6; ++i) compress(lane, (i * 3) % inputs_.size());
        while (!live_.empty()) {
          read_on(lane, live_.back());
          live_.pop_back();
        }
        return;
      }
      case 5: return delay();
      default: return mailbox_ ? delay() : graph();
    }
  }

  void compress(std::size_t lane, std::size_t which) {
    const Input& input = inputs_[which];
    const c10::OptionalStreamGuard guard(lanes_[lane].stream);
    Held lease{arena_->compress(input.h, at::empty_like(input.h), input.codec, Activation::relu), which, nullptr};
    ++compressed_;
    if (lanes_[lane].stream) {
      lease.compressed = std::make_shared<c10::Event>(arena_->device().type());
      lease.compressed->record(*lanes_[lane].stream);
    }
    live_.push_back(std::move(lease));
  }

  void read() {
    if (!live_.empty()) read_on(pick(lanes_.size()), live_[pick(live_.size())]);
  }

  void read_on(std::size_t index, const Held& lease) {
    Lane& lane = lanes_[index];
    const Input& input = inputs_[lease.input];
    const c10::OptionalStreamGuard guard(lane.stream);
    if (lane.stream) lease.compressed->block(*lane.stream);
    if (pick(4) == 0) {
      const at::Tensor grad = at::ones({input.h.numel()}, input.h.options());
      lease_of(lease.handle).gradient(grad, Activation::relu);
      compare(lane, grad, input.relu.gt(0).to(grad.scalar_type()));
    } else {
      const at::Tensor got = at::empty_like(input.h).fill_(-7);
      lease_of(lease.handle).restore(got, Activation::relu);
      compare(lane, got, input.relu);
    }
    ++reads_;
  }

  void compare(Lane& lane, const at::Tensor& got, const at::Tensor& expected) {
    const at::Tensor differs = bits_of(got).ne(bits_of(expected)), nan = got.isnan();
    lane.wrong.add_(differs.logical_and(nan.logical_not()).any());
    lane.lost.add_(nan.any());
  }

  void release() {
    if (live_.empty()) return;
    std::swap(live_[pick(live_.size())], live_.back());
    live_.pop_back();
  }

  // In turns with other threads, if there are any.
  void hand_over() {
    if (!mailbox_ || live_.empty()) return;
    mailbox_->put(std::move(live_.back()));
    live_.pop_back();
    if (std::optional<Held> other = mailbox_->take()) {
      read_on(pick(lanes_.size()), *other);
      if (pick(2)) live_.push_back(std::move(*other));
    }
  }

  void check_statistics(bool synchronize) {
    const MemoryStats stats = arena_->memory_stats(synchronize);
    if (mailbox_) return;  // other threads work on
    MemoryStats model;
    for (const Held& lease : live_) {
      const Input& input = inputs_[lease.input];
      model.in_use += input.in_use;
      model.payload_bytes += input.payload;
      model.dense_bytes += input.dense;
    }
    ASSERT_EQ(stats.live_leases, static_cast<std::int64_t>(live_.size()));
    ASSERT_EQ(stats.leases_total, compressed_);
    ASSERT_TRUE(!rules_.never_waits || stats.waits == 0) << stats.waits;
    ASSERT_TRUE(rules_.loses || stats.failures == 0) << stats.failures;
    ASSERT_TRUE(rules_.spills || stats.spilled == 0) << stats.spilled;
    ASSERT_LE(stats.in_use, model.in_use);
    ASSERT_LE(stats.payload_bytes, model.payload_bytes);
    ASSERT_LE(stats.dense_bytes, model.dense_bytes);
    if (rules_.options.capacity && arena_->device().is_cuda()) {
      ASSERT_TRUE(stats.capacity == *rules_.options.capacity || compressed_ == 0) << stats.capacity;
    }
    if (!synchronize) return;
    ASSERT_EQ(stats.in_use, model.in_use);
    ASSERT_EQ(stats.payload_bytes, model.payload_bytes);
    ASSERT_EQ(stats.dense_bytes, model.dense_bytes);
    ASSERT_GE(stats.high_water, stats.in_use);
    if (!rules_.loses) {
      ASSERT_GE(stats.capacity + stats.spilled, stats.in_use);
    }
  }

  void synchronize_and_note_failure() {
    try {
      arena_->memory_stats(true);
    } catch (const OutOfArenaMemory& error) {
      ++errors_;
      EXPECT_TRUE(rules_.loses) << error.what_without_backtrace();
    }
  }

#ifdef BITSPARSE_WITH_CUDA
  // Leases of one graph, whose slots go from one to the next.
  struct Graph {
    std::unique_ptr<at::cuda::CUDAGraph> graph;
    std::size_t lane;
    std::vector<at::Tensor> h, got;
  };

  void delay() {
    const std::size_t lane = pick(lanes_.size());
    if (!lanes_[lane].stream) return;
    const c10::OptionalStreamGuard guard(lanes_[lane].stream);
    at::cuda::sleep(static_cast<std::int64_t>(pick(2'000'000)));
  }

  void graph() {
    if (!lanes_[0].stream) return;
    if (graphs_.empty() || (graphs_.size() < 3 && pick(20) == 0)) return capture();
    if (pick(60) == 0) {
      drop_graphs();
      return;
    }
    for (std::size_t i = 1 + pick(4); i > 0; --i) replay(graphs_[pick(graphs_.size())]);
  }

  void capture() {
    c10::cuda::device_synchronize();
    synchronize_and_note_failure();  // nothing may be thrown while capturing
    Graph g{std::make_unique<at::cuda::CUDAGraph>(), pick(lanes_.size()), {}, {}};
    const c10::OptionalStreamGuard guard(lanes_[g.lane].stream);
    const std::size_t count = 1 + pick(4);
    for (std::size_t i = 0; i < count; ++i) {
      g.h.push_back(inputs_[0].h.clone());
      g.got.push_back(at::empty_like(inputs_[0].h));
    }
    c10::cuda::device_synchronize();
    const bool one_after_another = pick(2);
    g.graph->capture_begin();
    std::vector<at::Tensor> handles;
    for (std::size_t i = 0; i < count; ++i) {
      handles.push_back(arena_->compress(g.h[i], at::empty_like(g.h[i]), Codec::tight, Activation::relu));
      ++compressed_;
      if (!one_after_another) continue;
      lease_of(handles.back()).restore(g.got[i], Activation::relu);
      handles.back().reset();
    }
    for (std::size_t i = count; i-- > 0 && !one_after_another;) {
      lease_of(handles[i]).restore(g.got[i], Activation::relu);
      handles[i].reset();
    }
    g.graph->capture_end();
    graphs_.push_back(std::move(g));
    captured_ = true;
  }

  void replay(Graph& g) {
    Lane& lane = lanes_[g.lane];
    const c10::OptionalStreamGuard guard(lane.stream);
    std::vector<std::size_t> which;
    for (std::size_t i = 0; i < g.h.size(); ++i) {
      which.push_back(pick(kGraphInputs));
      g.h[i].copy_(inputs_[which[i]].h);
      g.got[i].fill_(-7);
    }
    g.graph->replay();
    for (std::size_t i = 0; i < g.h.size(); ++i) compare(lane, g.got[i], inputs_[which[i]].relu);
    reads_ += static_cast<std::int64_t>(which.size());
  }

  bool drop_graphs() {
    const bool any = captured_;
    if (graphs_.empty()) return any;
    c10::cuda::device_synchronize();
    graphs_.clear();
    return any;
  }

  std::vector<Graph> graphs_;
  bool captured_ = false;  // ever
#else
  void delay() {}
  void graph() {}
  bool drop_graphs() { return false; }
#endif

  std::shared_ptr<Arena> arena_;
  const Case& rules_;
  const std::vector<Input>& inputs_;
  std::mt19937_64 rng_;
  Mailbox* mailbox_;
  std::vector<Lane> lanes_;
  std::vector<Held> live_;
  std::int64_t compressed_ = 0, reads_ = 0, lost_ = 0, errors_ = 0;
};

std::uint64_t first_seed() {
  const char* given = std::getenv("BITSPARSE_TEST_SEED");
  const std::uint64_t seed = given ? std::stoull(given) : std::random_device{}();
  std::cout << "BITSPARSE_TEST_SEED=" << seed << std::endl;
  return seed;
}

void expect_nothing_is_left(Arena& arena) {
  MemoryStats stats;
  try {
    stats = arena.memory_stats(true);
  } catch (const OutOfArenaMemory&) {
    stats = arena.memory_stats(true);
  }
  EXPECT_EQ(stats.in_use, 0);
  EXPECT_EQ(stats.spilled, 0);
  EXPECT_EQ(stats.live_leases, 0);
  EXPECT_EQ(stats.payload_bytes, 0);
}

// That every page is back, each once: leases that take all of them are right, all at the same time.
void expect_all_room(Arena& arena, const Case& rules, const std::vector<Input>& inputs) {
  const Input& input = inputs[kGraphInputs - 1];
  const std::int64_t count = *rules.options.capacity / input.in_use;
  std::vector<at::Tensor> handles;
  for (std::int64_t i = 0; i < count; ++i)
    handles.push_back(arena.compress(input.h, at::empty_like(input.h), input.codec, Activation::relu));
  for (const at::Tensor& handle : handles) {
    const at::Tensor got = at::empty_like(input.h).fill_(-7);
    lease_of(handle).restore(got, Activation::relu);
    EXPECT_TRUE(bits_of(got).equal(bits_of(input.relu)));
  }
  const MemoryStats stats = arena.memory_stats(true);
  EXPECT_EQ(stats.in_use, count * input.in_use);
  EXPECT_EQ(stats.spilled, 0);
}

void run_case(c10::Device device, const Case& rules, const std::vector<Input>& inputs, std::uint64_t seed,
              int operations) {
  SCOPED_TRACE(::testing::Message() << rules.name << ", BITSPARSE_TEST_SEED=" << seed);
  const auto arena = Arena::create(device, rules.options);
  std::int64_t reads = 0, lost = 0, errors = 0;
  const auto finish = [&](Machine& machine) {
    machine.finish();
    reads += machine.reads();
    lost += machine.lost();
    errors += machine.errors();
  };
  {
    Machine alone(arena, rules, inputs, seed);
    alone.run(operations);
    finish(alone);
  }
  if (::testing::Test::HasFailure()) return;
  expect_nothing_is_left(*arena);
  if (rules.options.capacity && device.is_cuda()) expect_all_room(*arena, rules, inputs);

  constexpr int kThreads = 4;
  Mailbox mailbox;
  std::vector<std::unique_ptr<Machine>> machines;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    machines.push_back(
        std::make_unique<Machine>(arena, rules, inputs, seed * kThreads + static_cast<unsigned>(t), &mailbox));
  for (auto& machine : machines) {
    threads.emplace_back([&] {
      try {
        machine->run(operations / kThreads);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (mailbox.take()) {
  }
  for (auto& machine : machines) finish(*machine);
  expect_nothing_is_left(*arena);
  if (rules.options.capacity && device.is_cuda()) expect_all_room(*arena, rules, inputs);

  const MemoryStats stats = arena->memory_stats();
  std::cout << rules.name << ": " << stats.leases_total << " leases, " << reads << " reads, " << lost << " with NaN, "
            << errors << " errors; capacity " << stats.capacity << ", waits " << stats.waits << ", growths "
            << stats.growths << ", failures " << stats.failures << std::endl;
  EXPECT_EQ(errors > 0, stats.failures > 0) << "every loss is reported, and nothing else";
  EXPECT_TRUE(lost == 0 || errors > 0) << "NaN without an error";
}

TEST(ArenaStress, Cpu) {
  const std::vector<Input> inputs = make_inputs(c10::kCPU);
  run_case(c10::kCPU, Case{"CPU", {}}, inputs, first_seed(), 6000);
}

class CudaArenaStress : public GpuTest {};

// 2 * 12 000 operations in each of five arenas, and as many launches for them to meet on the device.
TEST_F(CudaArenaStress, Cuda) {
#ifdef BITSPARSE_WITH_CUDA
  const c10::Device device(c10::kCUDA, 0);
  const std::vector<Input> inputs = make_inputs(device);
  const std::uint64_t seed = first_seed();
  constexpr std::int64_t kSpill = 128 << 20;  // more than all leases of all streams
  ArenaOptions automatic, worst, bounded, spilling, losing;
  automatic.spill_bytes = bounded.spill_bytes = spilling.spill_bytes = kSpill;
  worst.worst_case = true;
  bounded.density_bound = 0.3;
  spilling.capacity = losing.capacity = 12 * kPage;
  losing.spill_bytes = 0;
  const Case cases[] = {
      {"automatic", automatic, false, true, false},  {"worst_case", worst, false, false, true},
      {"density_bound", bounded, false, true, true}, {"fixed, spilling", spilling, false, true, true},
      {"fixed, losing", losing, true, false, true},
  };
  for (const Case& rules : cases) {
    run_case(device, rules, inputs, seed, 12'000);
    if (HasFailure()) return;
  }
#endif
}

}  // namespace
}  // namespace bitsparse
