// Arenas and leases: what is in use, what happens when there is no room, and exact values whatever the order of ends.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bitsparse/arena.h"
#include "bitsparse/error.h"
#include "cpu/codec.h"
#include "dtype.h"
#include "gpu.h"
#include "lease.h"
#ifdef BITSPARSE_WITH_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#endif

namespace bitsparse {
namespace {

constexpr at::ScalarType kTypes[] = {at::kBFloat16, at::kHalf, at::kFloat, at::kFloat8_e4m3fn, at::kFloat8_e5m2};
constexpr Codec kCodecs[] = {Codec::raw, Codec::signless, Codec::tight};
constexpr Activation kActivations[] = {Activation::relu, Activation::relu_squared};

// A pre-activation on the CPU: the given share is positive, the rest negative, +0 or -0.
at::Tensor pre_activation(std::int64_t n, at::ScalarType type, double density, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<float> values(static_cast<std::size_t>(n));
  for (float& value : values) {
    const auto bits = rng();
    const float magnitude = std::ldexp(1.0f + static_cast<float>(bits >> 40) * 0x1p-24f, -static_cast<int>(bits % 7));
    const bool positive = static_cast<double>((bits >> 8) % 100000) < density * 100000;
    value = positive ? magnitude : bits & 0x80 ? -magnitude : bits & 0x100 ? 0.0f : -0.0f;
  }
  return at::from_blob(values.data(), {n}, at::kFloat).to(type, /*non_blocking=*/false, /*copy=*/true);
}

// By the CPU codec.
at::Tensor relu_of(const at::Tensor& h, Codec codec = Codec::tight) {
  const at::Tensor packed = cpu::pack(h, dtype_of(h.scalar_type(), "h"), codec, Keep::positive);
  at::Tensor relu = at::empty_like(h);
  cpu::unpack(packed, relu.data_ptr());
  return relu;
}
// 8-bit floats by way of float; nothing here is beyond their range.
bool by_float(const at::Tensor& t) { return t.element_size() == 1; }
at::Tensor activated(const at::Tensor& relu, Activation activation) {
  if (activation == Activation::relu) return relu;
  if (by_float(relu)) return activated(relu.to(at::kFloat), activation).to(relu.scalar_type());
  return at::mul(relu, relu);
}
at::Tensor gradient_of(const at::Tensor& relu, const at::Tensor& grad, Activation activation) {
  if (by_float(relu)) return gradient_of(relu.to(at::kFloat), grad.to(at::kFloat), activation).to(relu.scalar_type());
  return at::threshold_backward(activation == Activation::relu ? grad : at::mul(grad, at::mul(relu, 2.0)), relu, 0);
}

::testing::AssertionResult same_bits(const at::Tensor& got, const at::Tensor& expected) {
  const at::Tensor a = got.cpu(), b = expected.cpu();
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type())
    return ::testing::AssertionFailure() << "other shape";
  const auto* x = static_cast<const std::uint8_t*>(a.const_data_ptr());
  const auto* y = static_cast<const std::uint8_t*>(b.const_data_ptr());
  const std::size_t size = a.nbytes(), element = a.element_size();
  std::size_t wrong = 0, first = 0;
  for (std::size_t i = 0; i < size; i += element) {
    if (std::memcmp(x + i, y + i, element) != 0 && wrong++ == 0) first = i / element;
  }
  if (wrong == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << wrong << " of " << a.numel() << " elements differ, first at " << first;
}

at::Tensor poisoned_like(const at::Tensor& t) {
  at::Tensor poisoned = at::empty_like(t);
  poisoned.view(at::kByte).fill_(0xa5);
  return poisoned;
}

// Compress, restore and gradient on `device` against the CPU codec and PyTorch's CPU operators.
void check_round_trip(Arena& arena, const at::Tensor& h, Codec codec, Activation activation) {
  SCOPED_TRACE(::testing::Message() << "type " << h.scalar_type() << " codec " << static_cast<int>(codec)
                                    << " activation " << static_cast<int>(activation) << " elements " << h.numel());
  const at::Tensor relu = relu_of(h, codec), before = h.clone();
  const at::Tensor there = h.to(arena.device()), out = poisoned_like(there);
  const at::Tensor handle = arena.compress(there, out, codec, activation);
  // PyTorch's relu lets -0.0 through on the CPU and not on the GPU; what is stored has +0.
  const at::Tensor forward = activated(there.is_cuda() || by_float(h) ? relu : at::relu(h), activation);
  EXPECT_TRUE(same_bits(out, forward)) << "activation";
  EXPECT_TRUE(same_bits(there, before)) << "input after compress";
  for (int i = 0; i < 2; ++i) {
    const at::Tensor restored = poisoned_like(there);
    lease_of(handle).restore(restored, activation);
    EXPECT_TRUE(same_bits(restored, activated(relu, activation))) << "restored";
    const at::Tensor dense = pre_activation(h.numel(), h.scalar_type(), 0.5, 99);
    const at::Tensor grad = dense.to(arena.device(), /*non_blocking=*/false, /*copy=*/true);
    lease_of(handle).gradient(grad, activation);
    EXPECT_TRUE(same_bits(grad, gradient_of(relu, dense, activation))) << "gradient";
  }
  const at::Tensor in_place = there.clone();
  const at::Tensor other = arena.compress(in_place, in_place, codec, activation);
  EXPECT_TRUE(same_bits(in_place, forward)) << "activation in place";
  const at::Tensor restored = poisoned_like(there);
  lease_of(other).restore(restored, Activation::relu);
  EXPECT_TRUE(same_bits(restored, relu)) << "restored after compress in place";
}

std::string what_of(const c10::Error& error) { return error.what_without_backtrace(); }

// A CPU arena counts the packed bytes themselves.

TEST(CpuArena, RoundTrips) {
  const auto arena = Arena::create(c10::kCPU);
  for (at::ScalarType type : kTypes) {
    for (Codec codec : kCodecs) {
      for (Activation activation : kActivations) {
        for (std::int64_t n : {0, 1, 7, 1023, 1024, 4097, 8192, 24576, 100003})
          check_round_trip(*arena, pre_activation(n, type, 0.2, static_cast<std::uint64_t>(n)), codec, activation);
      }
    }
  }
  EXPECT_EQ(arena->memory_stats().in_use, 0);
}

TEST(CpuArena, AccountsForEveryLease) {
  const auto arena = Arena::create(c10::kCPU);
  EXPECT_EQ(arena->device(), c10::Device(c10::kCPU));
  std::vector<at::Tensor> handles;
  std::int64_t bytes = 0, dense = 0;
  for (std::int64_t n : {5000, 0, 70001, 8192}) {
    at::Tensor h = pre_activation(n, at::kBFloat16, 0.1, 1);
    bytes += cpu::pack(relu_of(h), DType::bfloat16, Codec::tight, Keep::positive).numel();
    dense += 2 * n;
    handles.push_back(arena->compress(h, h, Codec::tight, Activation::relu_squared));
    const MemoryStats stats = arena->memory_stats();
    EXPECT_EQ(stats.in_use, bytes);
    EXPECT_EQ(stats.payload_bytes, bytes);
    EXPECT_EQ(stats.dense_bytes, dense);
    EXPECT_EQ(stats.capacity, bytes);
    EXPECT_EQ(stats.live_leases, static_cast<std::int64_t>(handles.size()));
    EXPECT_EQ(stats.payload_ratio, static_cast<double>(bytes) / static_cast<double>(dense));
  }
  std::shuffle(handles.begin(), handles.end(), std::mt19937_64(2));
  while (!handles.empty()) handles.pop_back();
  MemoryStats stats = arena->memory_stats();
  EXPECT_EQ(stats.in_use, 0);
  EXPECT_EQ(stats.live_leases, 0);
  EXPECT_EQ(stats.dense_bytes, 0);
  EXPECT_EQ(stats.payload_ratio, 0);
  EXPECT_EQ(stats.high_water, bytes);
  EXPECT_EQ(stats.leases_total, 4);
  EXPECT_EQ(stats.failures + stats.waits + stats.growths + stats.spilled, 0);
  arena->reset_peak_memory_stats();
  EXPECT_EQ(arena->memory_stats(true).high_water, 0);
  arena->trim();
}

TEST(CpuArena, FullArenaSaysWhatIsNeeded) {
  at::Tensor h = pre_activation(10000, at::kHalf, 0.3, 1);
  const std::int64_t bytes = cpu::pack(relu_of(h), DType::float16, Codec::raw, Keep::positive).numel();
  ArenaOptions options;
  options.capacity = bytes + 10;
  const auto arena = Arena::create(c10::kCPU, options);
  at::Tensor out = at::empty_like(h);
  at::Tensor kept = arena->compress(h, out, Codec::raw, Activation::relu);
  try {
    arena->compress(h, out, Codec::raw, Activation::relu);
    ADD_FAILURE() << "no error";
  } catch (const c10::OutOfMemoryError& error) {
    EXPECT_NE(dynamic_cast<const OutOfArenaMemory*>(&error), nullptr);
    const std::string expected = "bitsparse.OutOfArenaMemory: the arena of cpu is full: a lease needs " +
                                 std::to_string(bytes) + " bytes, " + std::to_string(bytes) + " of its " +
                                 std::to_string(bytes + 10) + " bytes are in use. Raise Arena(capacity=...)";
    EXPECT_EQ(what_of(error), expected);
  }
  MemoryStats stats = arena->memory_stats();
  EXPECT_EQ(stats.failures, 1);
  EXPECT_EQ(stats.live_leases, 1);
  EXPECT_EQ(stats.in_use, bytes);
  EXPECT_EQ(stats.capacity, bytes + 10);
  at::Tensor restored = poisoned_like(h);
  lease_of(kept).restore(restored, Activation::relu);
  EXPECT_TRUE(same_bits(restored, relu_of(h)));
  kept.reset();
  kept = arena->compress(h, out, Codec::raw, Activation::relu);
  EXPECT_EQ(arena->memory_stats().in_use, bytes);
}

TEST(CpuArena, ManyThreads) {
  const auto arena = Arena::create(c10::kCPU);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 rng(static_cast<std::uint64_t>(t));
      std::vector<std::pair<at::Tensor, at::Tensor>> live;  // handle, relu
      for (int i = 0; i < 60; ++i) {
        const at::Tensor h = pre_activation(static_cast<std::int64_t>(rng() % 20000), at::kBFloat16, 0.2, rng());
        live.emplace_back(arena->compress(h, at::empty_like(h), Codec::tight, Activation::relu), relu_of(h));
        std::swap(live.back(), live[rng() % live.size()]);
        const at::Tensor restored = poisoned_like(live.back().second);
        lease_of(live.back().first).restore(restored, Activation::relu);
        if (!same_bits(restored, live.back().second)) ++wrong;
        if (rng() % 2) live.pop_back();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(arena->memory_stats().live_leases, 0);
  EXPECT_EQ(arena->memory_stats().in_use, 0);
  EXPECT_EQ(arena->memory_stats().leases_total, 240);
}

// Which arena is current.

TEST(CurrentArena, NullIsNoArena) { EXPECT_THROW(push_arena(nullptr), c10::ValueError); }

TEST(CurrentArena, InnermostGuardOfThisThread) {
  const auto outer = Arena::create(c10::kCPU), inner = Arena::create(c10::kCPU);
  const auto fallback = default_arena(c10::kCPU);
  EXPECT_TRUE(has_default_arena(c10::kCPU));
  EXPECT_EQ(default_arena(c10::kCPU), fallback);
  EXPECT_EQ(current_arena(c10::kCPU), fallback);
  {
    const ArenaGuard first(outer);
    EXPECT_EQ(current_arena(c10::kCPU), outer);
    {
      const ArenaGuard second(inner), third(outer), fourth(inner);
      EXPECT_EQ(current_arena(c10::kCPU), inner);
    }
    EXPECT_EQ(current_arena(c10::kCPU), outer);
    std::thread([&] { EXPECT_EQ(current_arena(c10::kCPU), fallback); }).join();
  }
  EXPECT_EQ(current_arena(c10::kCPU), fallback);
}

TEST(CurrentArena, PopTakesTheInnermostEntryOfItsArena) {
  const auto first = Arena::create(c10::kCPU), second = Arena::create(c10::kCPU);
  EXPECT_THROW(pop_arena(*first), c10::Error);
  push_arena(first);
  push_arena(second);
  push_arena(first);
  push_arena(second);
  pop_arena(*first);  // in another order than they came
  EXPECT_EQ(current_arena(c10::kCPU), second);
  pop_arena(*second);
  EXPECT_EQ(current_arena(c10::kCPU), second);
  pop_arena(*second);
  EXPECT_EQ(current_arena(c10::kCPU), first);
  pop_arena(*first);
  EXPECT_EQ(current_arena(c10::kCPU), default_arena(c10::kCPU));
  EXPECT_THROW(pop_arena(*first), c10::Error);
}

TEST(CurrentArena, MemoryStatsAreTheDefaultArenas) {
  at::Tensor h = pre_activation(3000, at::kFloat, 0.5, 1);
  const auto before = memory_stats(c10::kCPU).leases_total;
  const at::Tensor handle = default_arena(c10::kCPU)->compress(h, h, Codec::raw, Activation::relu);
  EXPECT_EQ(memory_stats(c10::kCPU).leases_total, before + 1);
  EXPECT_GT(memory_stats(c10::kCPU).in_use, 0);
}

TEST(ArenaOptions, WrongOnesAreNamed) {
  const auto message = [](const ArenaOptions& options, c10::Device device = c10::kCPU) -> std::string {
    try {
      Arena::create(device, options);
    } catch (const c10::ValueError& error) {
      return what_of(error);
    }
    return "no ValueError";
  };
  ArenaOptions options;
  options.capacity = -1;
  EXPECT_EQ(message(options), "bitsparse: Arena: expected capacity >= 0 bytes, got -1");
  options.capacity = 1;
  options.worst_case = true;
  EXPECT_EQ(message(options),
            "bitsparse: Arena: expected at most one of capacity, density_bound and worst_case, got 2");
  options = {};
  for (double bound : {0.0, -1.0, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    options.density_bound = bound;
    EXPECT_NE(message(options).find("expected density_bound in (0, 1], got"), std::string::npos) << message(options);
  }
  options = {};
  options.spill_bytes = -1;
  EXPECT_EQ(message(options), "bitsparse: Arena: expected spill_bytes >= 0, got -1");
  EXPECT_NE(message({}, c10::kMeta).find("expected device to be cpu"), std::string::npos);
}

// The handle.

TEST(LeaseHandle, IsItsStorage) {
  const auto arena = Arena::create(c10::kCPU);
  const at::Tensor h = pre_activation(5000, at::kBFloat16, 0.2, 1), relu = relu_of(h);
  at::Tensor handle = arena->compress(h, at::empty_like(h), Codec::tight, Activation::relu);
  EXPECT_EQ(handle.scalar_type(), at::kByte);
  EXPECT_EQ(handle.numel(), kHandleBytes);
  EXPECT_TRUE(is_lease(handle));
  const LeaseInfo& info = lease_of(handle).info();
  EXPECT_EQ(info.numel, 5000);
  EXPECT_EQ(info.dtype, at::kBFloat16);
  EXPECT_EQ(info.codec, Codec::tight);
  EXPECT_EQ(info.device, h.device());

  handle.fill_(0xee);  // its bytes mean nothing
  std::vector<at::Tensor> views = {handle.view({4, 4}), handle.narrow(0, 3, 2), handle.detach(), handle.view(at::kInt)};
  handle.reset();
  while (!views.empty()) {
    const at::Tensor restored = poisoned_like(h);
    lease_of(views.back()).restore(restored, Activation::relu);
    EXPECT_TRUE(same_bits(restored, relu));
    EXPECT_EQ(arena->memory_stats().live_leases, 1);
    views.pop_back();
  }
  EXPECT_EQ(arena->memory_stats().live_leases, 0);
}

TEST(LeaseHandle, ACopyIsNoLease) {
  const auto arena = Arena::create(c10::kCPU);
  const at::Tensor h = pre_activation(5000, at::kBFloat16, 0.2, 1);
  const at::Tensor handle = arena->compress(h, at::empty_like(h), Codec::tight, Activation::relu);
  for (const at::Tensor& copy : {handle.clone(), handle.to(at::kInt), at::Tensor()}) {
    EXPECT_FALSE(is_lease(copy));
    try {
      lease_of(copy.defined() ? copy : handle.clone());
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_NE(what_of(error).find("A lease cannot be copied"), std::string::npos) << what_of(error);
    }
  }
  EXPECT_EQ(arena->memory_stats().live_leases, 1);
}

TEST(LeaseHandle, KeepsItsArena) {
  auto arena = Arena::create(c10::kCPU);
  const std::weak_ptr<Arena> watched = arena;
  const at::Tensor h = pre_activation(5000, at::kBFloat16, 0.2, 1);
  at::Tensor handle = arena->compress(h, at::empty_like(h), Codec::tight, Activation::relu);
  arena.reset();
  EXPECT_FALSE(watched.expired());
  const at::Tensor restored = poisoned_like(h);
  lease_of(handle).restore(restored, Activation::relu);
  EXPECT_TRUE(same_bits(restored, relu_of(h)));
  handle.reset();
  EXPECT_TRUE(watched.expired());
}

class CudaArena : public GpuTest {};

#ifdef BITSPARSE_WITH_CUDA

using c10::cuda::CUDAStream;
using c10::cuda::CUDAStreamGuard;

constexpr std::int64_t kPage = 512 << 10;
constexpr std::int64_t kTile = BlockLayout<2>::kTileElements;

c10::Device gpu() { return {c10::kCUDA, 0}; }
ArenaOptions fixed_capacity(std::int64_t bytes, std::int64_t spill_bytes = 0) {
  ArenaOptions options;
  options.capacity = bytes;
  options.spill_bytes = spill_bytes;
  return options;
}
at::Tensor compress_copy(Arena& arena, const at::Tensor& h, Codec codec = Codec::tight) {
  return arena.compress(h, at::empty_like(h), codec, Activation::relu);
}
at::Tensor restored_from(const at::Tensor& handle, const at::Tensor& like) {
  const at::Tensor out = poisoned_like(like);
  lease_of(handle).restore(out, Activation::relu);
  return out;
}
// What a lease of `there` takes, in bytes of whole pages.
std::int64_t bytes_of(const at::Tensor& there) {
  const auto arena = Arena::create(gpu());
  const at::Tensor handle = compress_copy(*arena, there);
  return arena->memory_stats(true).in_use;
}
void expect_idle(Arena& arena) {
  const MemoryStats stats = arena.memory_stats(true);
  EXPECT_EQ(stats.in_use, 0);
  EXPECT_EQ(stats.live_leases, 0);
  EXPECT_EQ(stats.spilled, 0);
  EXPECT_EQ(stats.dense_bytes, 0);
  EXPECT_EQ(stats.payload_bytes, 0);
}

TEST_F(CudaArena, RoundTrips) {
  const auto arena = Arena::create(gpu());
  for (at::ScalarType type : kTypes) {
    for (Codec codec : kCodecs) {
      for (Activation activation : kActivations) {
        for (std::int64_t n : {0, 1, 7, 1023, 4097, 8192, 24576, 100003})
          check_round_trip(*arena, pre_activation(n, type, 0.2, static_cast<std::uint64_t>(n)), codec, activation);
      }
    }
    for (double density : {0.0, 0.01, 0.6, 1.0})
      check_round_trip(*arena, pre_activation(3'000'001, type, density, 5), Codec::tight, Activation::relu_squared);
  }
  expect_idle(*arena);
}

// What relu lets through keeps its bits: NaNs with their payload, infinities, subnormals.
TEST_F(CudaArena, EverySixteenBitPattern) {
  const auto arena = Arena::create(gpu());
  std::vector<std::uint16_t> patterns(1 << 16);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i * 40503);  // each once
  const at::Tensor bits = at::from_blob(patterns.data(), {1 << 16}, at::kShort).clone();
  for (at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    for (Codec codec : kCodecs) {
      const at::Tensor h = bits.view(type), there = h.to(gpu()), out = poisoned_like(there);
      const at::Tensor handle = arena->compress(there, out, codec, Activation::relu);
      EXPECT_TRUE(same_bits(out, relu_of(h)));
      EXPECT_TRUE(same_bits(restored_from(handle, there), relu_of(h)));
    }
  }
}

TEST_F(CudaArena, PointersOfAnyAlignment) {
  const auto arena = Arena::create(gpu());
  for (at::ScalarType type : kTypes) {
    for (std::int64_t offset : {1, 2, 3, 5}) {
      const at::Tensor h = pre_activation(50001, type, 0.3, 3).narrow(0, offset, 40000).clone();
      const at::Tensor in = pre_activation(50001, type, 0.3, 3).to(gpu()).narrow(0, offset, 40000);
      const at::Tensor out = poisoned_like(pre_activation(50001, type, 0.3, 4).to(gpu())).narrow(0, 7 - offset, 40000);
      const at::Tensor handle = arena->compress(in, out, Codec::tight, Activation::relu);
      EXPECT_TRUE(same_bits(out, relu_of(h)));
      out.fill_(-7);
      lease_of(handle).restore(out, Activation::relu);
      EXPECT_TRUE(same_bits(out, relu_of(h)));
    }
  }
}

TEST_F(CudaArena, StatisticsFollowLeases) {
  const auto arena = Arena::create(gpu());
  MemoryStats stats = arena->memory_stats();
  EXPECT_EQ(stats.capacity + stats.in_use + stats.high_water + stats.leases_total + stats.growths, 0);
  const at::Tensor h = pre_activation(1'000'003, at::kBFloat16, 0.3, 1), there = h.to(gpu());
  const PackedHeader header = cpu::validate(cpu::pack(h, DType::bfloat16, Codec::tight, Keep::positive), false);
  const auto payload = static_cast<std::int64_t>(header.payload_bytes);
  std::vector<at::Tensor> handles;
  for (int i = 1; i <= 3; ++i) {
    handles.push_back(compress_copy(*arena, there));
    stats = arena->memory_stats(true);
    EXPECT_EQ(stats.in_use, i * ((payload + kPage - 1) / kPage * kPage));
    EXPECT_EQ(stats.payload_bytes, i * payload);
    EXPECT_EQ(stats.dense_bytes, i * 2 * h.numel());
    EXPECT_DOUBLE_EQ(stats.payload_ratio, static_cast<double>(payload) / static_cast<double>(2 * h.numel()));
    EXPECT_EQ(stats.live_leases, i);
    EXPECT_EQ(stats.leases_total, i);
    EXPECT_GE(stats.capacity, stats.in_use);
    EXPECT_GE(stats.growths, 1);
    EXPECT_EQ(stats.spilled, 0);
    EXPECT_EQ(stats.failures, 0);
  }
  handles.erase(handles.begin() + 1);
  EXPECT_EQ(arena->memory_stats(true).payload_bytes, 2 * payload);
  handles.clear();
  expect_idle(*arena);
  EXPECT_EQ(arena->memory_stats().high_water, stats.in_use);
}

TEST_F(CudaArena, LeasesEndInAnyOrder) {
  const auto arena = Arena::create(gpu());
  std::mt19937_64 rng(7);
  struct Live {
    at::Tensor handle, relu;
  };
  std::vector<Live> live;
  for (int i = 0; i < 300; ++i) {
    if (live.size() < 12 && (live.empty() || rng() % 5 < 3)) {
      const auto n = static_cast<std::int64_t>(rng() % 400'000);
      const at::Tensor h = pre_activation(n, kTypes[rng() % 3], static_cast<double>(rng() % 100) / 100, rng());
      live.push_back({compress_copy(*arena, h.to(gpu()), kCodecs[rng() % 3]), relu_of(h)});
    } else {
      std::swap(live[rng() % live.size()], live.back());
      ASSERT_TRUE(same_bits(restored_from(live.back().handle, live.back().relu.to(gpu())), live.back().relu)) << i;
      live.pop_back();
    }
  }
  live.clear();
  expect_idle(*arena);
  EXPECT_EQ(arena->memory_stats().failures, 0);
}

// Threads with streams of their own, one arena. No step ends while they run, so there is always room for the worst
// case.
void run_threads(Arena& arena) {
  const at::Tensor anchor = compress_copy(arena, pre_activation(10, at::kBFloat16, 0.5, 1).to(gpu()));
  const std::int64_t before = arena.memory_stats(true).leases_total;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      try {
        const CUDAStreamGuard guard(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0));
        std::mt19937_64 rng(static_cast<std::uint64_t>(t));
        std::vector<at::Tensor> inputs, expected;
        for (double density : {0.02, 0.3, 0.9}) {
          const at::Tensor h = pre_activation(200'000 + 1000 * t, at::kBFloat16, density, rng());
          inputs.push_back(h.to(gpu()));
          expected.push_back(relu_of(h).to(gpu()));
        }
        std::vector<std::pair<at::Tensor, std::size_t>> live;
        for (int i = 0; i < 150; ++i) {
          const std::size_t which = rng() % inputs.size();
          live.emplace_back(compress_copy(arena, inputs[which]), which);
          if (live.size() < 6 && rng() % 2) continue;
          std::swap(live.back(), live[rng() % live.size()]);
          const at::Tensor& relu = expected[live.back().second];
          const at::Tensor restored = restored_from(live.back().first, relu);
          if (!restored.view(at::kShort).equal(relu.view(at::kShort))) ++wrong;
          live.pop_back();
        }
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  const MemoryStats stats = arena.memory_stats(true);
  EXPECT_EQ(stats.leases_total, before + 600);
  EXPECT_EQ(stats.live_leases, 1);
  EXPECT_EQ(stats.failures, 0);
  EXPECT_EQ(stats.spilled, 0);
}

TEST_F(CudaArena, ManyThreadsAndStreams) {
  const auto arena = Arena::create(gpu());
  run_threads(*arena);
  expect_idle(*arena);
}

TEST_F(CudaArena, ManyThreadsAndStreamsInTheWorstCase) {
  ArenaOptions options;
  options.worst_case = true;
  const auto arena = Arena::create(gpu(), options);
  {
    std::vector<at::Tensor> many;
    for (int i = 0; i < 64; ++i)
      many.push_back(compress_copy(*arena, pre_activation(204'000, at::kBFloat16, 0.5, 1).to(gpu())));
  }
  run_threads(*arena);
  expect_idle(*arena);
  EXPECT_EQ(arena->memory_stats().waits, 0);
}

// A lease is read on another stream, which is late, and ends at once. There is room for one lease only: the next one
// gets its pages, but not before the reader is through.
TEST_F(CudaArena, PagesWaitForReadersOnOtherStreams) {
  const at::Tensor h[2] = {pre_activation(1'000'003, at::kBFloat16, 0.3, 1),
                           pre_activation(1'000'003, at::kBFloat16, 0.3, 2)};
  const at::Tensor relu[2] = {relu_of(h[0]), relu_of(h[1])};
  const at::Tensor there[2] = {h[0].to(gpu()), h[1].to(gpu())};
  const auto arena = Arena::create(gpu(), fixed_capacity(std::max(bytes_of(there[0]), bytes_of(there[1]))));
  const CUDAStream reader = c10::cuda::getStreamFromPool(false, 0);
  for (int i = 0; i < 6; ++i) {
    at::Tensor handle = compress_copy(*arena, there[i % 2]);
    at::cuda::CUDAEvent compressed;
    compressed.record();
    at::Tensor restored;
    {
      const CUDAStreamGuard guard(reader);
      compressed.block(reader);
      restored = poisoned_like(there[0]);
      at::cuda::sleep(20'000'000);
      lease_of(handle).restore(restored, Activation::relu);
    }
    handle.reset();
    const at::Tensor next = compress_copy(*arena, there[(i + 1) % 2]);
    ASSERT_TRUE(same_bits(restored_from(next, there[0]), relu[(i + 1) % 2])) << i;
    const CUDAStreamGuard guard(reader);
    ASSERT_TRUE(same_bits(restored, relu[i % 2])) << i;
  }
  expect_idle(*arena);
  EXPECT_EQ(arena->memory_stats().failures, 0);
}

// Room that one stream's growth promised is there for the others, although that stream is late.
TEST_F(CudaArena, StreamsWaitForAllGrowths) {
  const auto dense = [](std::int64_t worst_pages) {  // all elements kept: needs nearly its worst case
    const std::int64_t tiles = worst_pages * kPage / kUnitBytes / max_tile_units(DType::bfloat16);
    return pre_activation(std::max<std::int64_t>(tiles, 1) * kTile, at::kBFloat16, 1.0, 1);
  };
  const at::Tensor tiny = dense(0).to(gpu()), first = dense(16), second = dense(15);
  const at::Tensor first_there = first.to(gpu()), second_there = second.to(gpu());
  ArenaOptions options;
  options.worst_case = true;  // otherwise the host waits for sizes before it grows
  const auto arena = Arena::create(gpu(), options);
  const at::Tensor nothing = compress_copy(*arena, tiny.narrow(0, 0, 0));  // the pool is there
  c10::cuda::device_synchronize();
  const CUDAStream late = c10::cuda::getStreamFromPool(false, 0), b = c10::cuda::getStreamFromPool(false, 0),
                   c = c10::cuda::getStreamFromPool(false, 0);
  at::Tensor handles[3];
  {
    const CUDAStreamGuard guard(late);
    at::cuda::sleep(200'000'000);
    handles[0] = compress_copy(*arena, tiny);  // 16 pages, once `late` gets to it
  }
  {
    const CUDAStreamGuard guard(b);
    handles[1] = compress_copy(*arena, first_there, Codec::raw);  // 16 more
  }
  {
    const CUDAStreamGuard guard(c);
    handles[2] = compress_copy(*arena, second_there, Codec::raw);  // needs no growth
  }
  c10::cuda::device_synchronize();
  EXPECT_NO_THROW(arena->memory_stats(true));
  EXPECT_TRUE(same_bits(restored_from(handles[1], first_there), first));
  EXPECT_TRUE(same_bits(restored_from(handles[2], second_there), second));
}

// Every tile is exact or, as a whole, NaN. Returns the number of those.
std::int64_t lost_tiles(const at::Tensor& got, const at::Tensor& expected) {
  const at::Tensor a = got.cpu(), b = expected.cpu();
  const auto* x = static_cast<const std::uint16_t*>(a.const_data_ptr());
  const auto* y = static_cast<const std::uint16_t*>(b.const_data_ptr());
  std::int64_t lost = 0;
  for (std::int64_t begin = 0; begin < a.numel(); begin += kTile) {
    const std::int64_t end = std::min(begin + kTile, a.numel());
    const bool exact = std::equal(x + begin, x + end, y + begin);
    const bool nan = std::all_of(x + begin, x + end, [](std::uint16_t bits) { return (bits & 0x7fff) > 0x7f80; });
    EXPECT_TRUE(exact || nan) << "tile " << begin / kTile << " is neither exact nor NaN";
    lost += nan;
  }
  return lost;
}

TEST_F(CudaArena, FixedCapacities) {
  const at::Tensor h = pre_activation(4'000'003, at::kBFloat16, 0.3, 1), there = h.to(gpu()), relu = relu_of(h);
  const std::int64_t needed = bytes_of(there);
  ASSERT_GT(needed, 2 * kPage);
  const std::int64_t tiles = tile_count(DType::bfloat16, h.numel());
  const at::Tensor dense_grad = pre_activation(h.numel(), at::kBFloat16, 0.5, 9);
  for (std::int64_t capacity : {std::int64_t{0}, kPage, needed - kPage, needed}) {
    SCOPED_TRACE(::testing::Message() << capacity << " of " << needed << " bytes");
    const auto arena = Arena::create(gpu(), fixed_capacity(capacity));
    for (int round = 0; round < 3; ++round) {  // a failure leaves the arena as it was
      at::Tensor handle = compress_copy(*arena, there);
      c10::cuda::device_synchronize();
      EXPECT_EQ(arena->memory_stats().capacity, capacity);
      if (capacity == needed) {
        EXPECT_TRUE(same_bits(restored_from(handle, there), relu));
        EXPECT_EQ(arena->memory_stats(true).in_use, needed);
        EXPECT_EQ(arena->memory_stats().failures, 0);
      } else {
        try {
          compress_copy(*arena, there.narrow(0, 0, 100));
          ADD_FAILURE() << "no error";
        } catch (const c10::OutOfMemoryError& error) {
          EXPECT_NE(dynamic_cast<const OutOfArenaMemory*>(&error), nullptr);
          const std::string what = what_of(error);
          EXPECT_EQ(what.find("bitsparse.OutOfArenaMemory: the arena of cuda:0 was full"), 0u) << what;
          EXPECT_NE(what.find("capacity is " + std::to_string(capacity) + " bytes"), std::string::npos) << what;
          EXPECT_NE(what.find("Raise Arena(capacity=...)"), std::string::npos) << what;
        }
        EXPECT_GE(arena->memory_stats().failures, round + 1);
        const std::int64_t lost = lost_tiles(restored_from(handle, there), relu);
        EXPECT_GT(lost, 0);
        if (capacity == 0) {
          EXPECT_EQ(lost, tiles);
        } else {
          EXPECT_LT(lost, tiles);
        }
        const at::Tensor grad = dense_grad.to(gpu());
        lease_of(handle).gradient(grad, Activation::relu);
        EXPECT_EQ(lost_tiles(grad, gradient_of(relu, dense_grad, Activation::relu)), lost);
      }
      handle.reset();
      expect_idle(*arena);
    }
    if (capacity >= kPage) {  // all of it can still be used
      const at::Tensor part = there.narrow(0, 0, 20 * kTile);
      const at::Tensor handle = compress_copy(*arena, part);
      EXPECT_TRUE(same_bits(restored_from(handle, part), relu.narrow(0, 0, 20 * kTile)));
      EXPECT_NO_THROW(arena->memory_stats(true));
    }
  }
}

TEST_F(CudaArena, SpilledLeasesAreExact) {
  const at::Tensor h = pre_activation(4'000'003, at::kBFloat16, 0.3, 1), there = h.to(gpu()), relu = relu_of(h);
  for (std::int64_t capacity : {std::int64_t{0}, kPage, 2 * kPage}) {
    const auto arena = Arena::create(gpu(), fixed_capacity(capacity, 8 << 20));
    for (int round = 0; round < 4; ++round) {
      const at::Tensor handles[2] = {compress_copy(*arena, there), compress_copy(*arena, there)};
      const MemoryStats stats = arena->memory_stats(true);
      EXPECT_EQ(stats.in_use - stats.spilled, capacity);
      EXPECT_GT(stats.spilled, 0);
      EXPECT_EQ(stats.capacity, capacity);
      for (const at::Tensor& handle : handles) EXPECT_TRUE(same_bits(restored_from(handle, there), relu));
    }
    expect_idle(*arena);
    EXPECT_EQ(arena->memory_stats().failures, 0);
  }
}

TEST_F(CudaArena, BoundsThatNeverWait) {
  std::vector<at::Tensor> inputs, relus;
  for (int i = 0; i < 4; ++i) {
    const at::Tensor h = pre_activation(500'000 + i, at::kBFloat16, 0.1 * i, static_cast<std::uint64_t>(i));
    inputs.push_back(h.to(gpu()));
    relus.push_back(relu_of(h));
  }
  ArenaOptions bounded, worst;
  bounded.density_bound = 0.5;
  bounded.spill_bytes = 4 << 20;
  worst.worst_case = true;
  for (const ArenaOptions& options : {bounded, worst}) {
    const auto arena = Arena::create(gpu(), options);
    for (int step = 0; step < 3; ++step) {
      std::vector<at::Tensor> handles;
      for (const at::Tensor& h : inputs) handles.push_back(compress_copy(*arena, h));
      for (std::size_t i = 0; i < handles.size(); ++i)
        EXPECT_TRUE(same_bits(restored_from(handles[i], inputs[i]), relus[i]));
    }
    expect_idle(*arena);
    EXPECT_EQ(arena->memory_stats().waits, 0);
    EXPECT_EQ(arena->memory_stats().failures, 0);
    EXPECT_EQ(arena->memory_stats().leases_total, 12);
  }
}

TEST_F(CudaArena, SettlesAfterTwoSteps) {
  std::vector<at::Tensor> inputs;
  for (double density : {0.02, 0.4, 0.1, 0.9, 0.05, 0.2, 0.0, 0.3})
    inputs.push_back(pre_activation(3'000'000, at::kBFloat16, density, 1).to(gpu()));
  const auto arena = Arena::create(gpu());
  std::int64_t used = 0;
  const auto step = [&] {
    std::vector<at::Tensor> handles;
    for (const at::Tensor& h : inputs) handles.push_back(compress_copy(*arena, h));
    if (used == 0) used = arena->memory_stats(true).in_use;
    while (!handles.empty()) {
      const at::Tensor out = at::empty_like(inputs[0]);
      lease_of(handles.back()).restore(out, Activation::relu);
      handles.pop_back();
    }
  };
  for (int i = 0; i < 2; ++i) step();
  const MemoryStats settled = arena->memory_stats(true);
  for (int i = 0; i < 8; ++i) step();
  const MemoryStats later = arena->memory_stats(true);
  EXPECT_EQ(later.waits, settled.waits);
  EXPECT_EQ(later.growths, settled.growths);
  EXPECT_EQ(later.spilled, 0);
  EXPECT_EQ(later.failures, 0);
  EXPECT_EQ(later.high_water, used) << "pages of leases that have ended are not held beside those of live ones";
  EXPECT_GE(later.capacity, used);
  EXPECT_LE(static_cast<double>(later.capacity), 1.3 * static_cast<double>(used));
  expect_idle(*arena);
}

TEST_F(CudaArena, TrimGivesMemoryBack) {
  const at::Tensor h = pre_activation(8'000'000, at::kBFloat16, 0.05, 1), there = h.to(gpu());
  const auto arena = Arena::create(gpu());
  at::Tensor handle = compress_copy(*arena, there);
  const MemoryStats before = arena->memory_stats(true);
  EXPECT_GT(before.capacity, 3 * before.in_use) << "room for the worst case";
  arena->trim();
  EXPECT_EQ(arena->memory_stats().capacity, before.capacity) << "a lease is alive";
  EXPECT_TRUE(same_bits(restored_from(handle, there), relu_of(h)));
  handle.reset();
  expect_idle(*arena);
  arena->trim();
  const MemoryStats after = arena->memory_stats();
  EXPECT_GE(after.capacity, after.high_water);
  EXPECT_LE(static_cast<double>(after.capacity), 1.15 * static_cast<double>(after.high_water) + 4 * kPage);
  handle = compress_copy(*arena, there);
  EXPECT_TRUE(same_bits(restored_from(handle, there), relu_of(h)));
  handle.reset();
  expect_idle(*arena);

  const auto fixed = Arena::create(gpu(), fixed_capacity(4 << 20));
  handle = compress_copy(*fixed, there.narrow(0, 0, 1000));
  handle.reset();
  fixed->trim();
  EXPECT_EQ(fixed->memory_stats().capacity, 4 << 20) << "fixed means fixed";
}

TEST_F(CudaArena, PeakCanBeReset) {
  const at::Tensor there = pre_activation(1'000'003, at::kBFloat16, 0.3, 1).to(gpu());
  const auto arena = Arena::create(gpu());
  arena->reset_peak_memory_stats();
  std::int64_t one = 0;
  for (int count : {3, 1, 2}) {
    std::vector<at::Tensor> handles;
    for (int i = 0; i < count; ++i) {
      handles.push_back(compress_copy(*arena, there));
      if (one == 0) one = arena->memory_stats(true).in_use;
    }
    handles.clear();
    expect_idle(*arena);
    EXPECT_EQ(arena->memory_stats().high_water, count * one);
    arena->reset_peak_memory_stats();
    EXPECT_EQ(arena->memory_stats(true).high_water, 0);
  }
  // What the arena has learnt about its size is not forgotten.
  arena->trim();
  EXPECT_GE(arena->memory_stats().capacity, 3 * one);
}

TEST_F(CudaArena, HandleOutlivesTheArena) {
  auto arena = Arena::create(gpu());
  const std::weak_ptr<Arena> watched = arena;
  const at::Tensor h = pre_activation(50'000, at::kBFloat16, 0.2, 1), there = h.to(gpu());
  at::Tensor handle = compress_copy(*arena, there);
  EXPECT_EQ(handle.device(), gpu());
  EXPECT_THROW(lease_of(handle.clone()), c10::Error);
  arena.reset();
  const at::Tensor view = handle.view({4, 4});
  handle.reset();
  EXPECT_FALSE(watched.expired());
  EXPECT_TRUE(same_bits(restored_from(view, there), relu_of(h)));
}

// What one lease leaves to the next: slot and pages.

// A lease's handle is the start of its slot.
const void* slot_of(const at::Tensor& handle) { return handle.const_data_ptr(); }

// Keeps the device from running what is enqueued, so that the host knows nothing of it. About half a second.
void hold_device() { at::cuda::sleep(1'000'000'000); }

TEST_F(CudaArena, EveryLayerFindsItsPagesAgain) {
  std::vector<at::Tensor> inputs, relus;
  for (double density : {0.4, 0.05, 0.9, 0.0, 0.2}) {
    const at::Tensor h = pre_activation(1'000'000, at::kBFloat16, density, 1);
    inputs.push_back(h.to(gpu()));
    relus.push_back(relu_of(h));
  }
  const auto arena = Arena::create(gpu());
  std::vector<const void*> slots[2];
  std::vector<at::Tensor> restored;
  MemoryStats settled;
  for (int step = 0; step < 60; ++step) {
    std::vector<at::Tensor> handles;
    for (const at::Tensor& h : inputs) {
      handles.push_back(compress_copy(*arena, h));
      if (step >= 58) slots[step - 58].push_back(slot_of(handles.back()));
    }
    restored.clear();
    for (std::size_t i = inputs.size(); i-- > 0; handles.pop_back())
      restored.push_back(restored_from(handles.back(), inputs[i]));
    if (step == 2) settled = arena->memory_stats(true);
  }
  EXPECT_EQ(slots[0], slots[1]);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    EXPECT_TRUE(same_bits(restored[inputs.size() - 1 - i], relus[i])) << "layer " << i;
  const MemoryStats stats = arena->memory_stats(true);
  EXPECT_EQ(stats.high_water, settled.high_water);
  EXPECT_EQ(stats.capacity, settled.capacity);
  EXPECT_EQ(stats.waits, settled.waits);
  EXPECT_EQ(stats.growths, settled.growths);
  EXPECT_EQ(stats.failures + stats.spilled, 0);
  EXPECT_EQ(stats.leases_total, 60 * 5);
  expect_idle(*arena);
}

TEST_F(CudaArena, OtherShapesAndStreamsGetOtherSlots) {
  ArenaOptions options;
  options.worst_case = true;
  const auto arena = Arena::create(gpu(), options);
  const at::Tensor small = pre_activation(100'000, at::kBFloat16, 0.2, 1).to(gpu()),
                   large = pre_activation(1'000'000, at::kBFloat16, 0.2, 1).to(gpu());
  at::Tensor first = compress_copy(*arena, large), second = compress_copy(*arena, large);
  const void* const slots[2] = {slot_of(first), slot_of(second)};
  EXPECT_NE(slots[0], slots[1]);
  second.reset();
  first.reset();
  first = compress_copy(*arena, large);
  EXPECT_EQ(slot_of(first), slots[0]) << "the last to end comes first";
  second = compress_copy(*arena, large);
  EXPECT_EQ(slot_of(second), slots[1]);
  second.reset();
  const at::Tensor other = compress_copy(*arena, small);
  EXPECT_NE(slot_of(other), slots[1]) << "another shape's";
  {
    const CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, 0));
    first.reset();
    const at::Tensor elsewhere = compress_copy(*arena, large);
    EXPECT_NE(slot_of(elsewhere), slots[0]) << "another stream's";
  }
}

// One slot, tensors that need more and fewer pages from one to the next; beside it there is room only for what it does
// not need.
TEST_F(CudaArena, PagesFollowTheDensity) {
  const double densities[] = {0.9, 0.01, 0.5, 0.0, 1.0, 0.05, 0.3, 0.02};
  std::vector<at::Tensor> inputs, relus;
  std::vector<std::int64_t> bytes;
  for (double density : densities) {
    const at::Tensor h = pre_activation(1'000'003, at::kBFloat16, density, 3);
    inputs.push_back(h.to(gpu()));
    relus.push_back(relu_of(h).to(gpu()));
    bytes.push_back(bytes_of(inputs.back()));
  }
  const std::size_t most = 4, least = 1;  // indices of the densest and of a sparse one
  const auto arena = Arena::create(gpu(), fixed_capacity(bytes[most] + bytes[least]));
  compress_copy(*arena, inputs[least]);
  expect_idle(*arena);
  hold_device();
  std::vector<at::Tensor> got, expected;
  for (int round = 0; round < 4; ++round) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor handle = compress_copy(*arena, inputs[i]);
      got.push_back(restored_from(handle, inputs[i]));
      expected.push_back(relus[i]);
    }
    const at::Tensor sparse = compress_copy(*arena, inputs[least]), dense = compress_copy(*arena, inputs[most]);
    for (const auto& [handle, i] : {std::pair(sparse, least), std::pair(dense, most)}) {
      got.push_back(restored_from(handle, inputs[i]));
      expected.push_back(relus[i]);
    }
  }
  const MemoryStats stats = arena->memory_stats(true);
  EXPECT_EQ(stats.failures, 0);
  EXPECT_EQ(stats.spilled, 0);
  EXPECT_EQ(stats.high_water, bytes[most] + bytes[least]);
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_TRUE(same_bits(got[i], expected[i])) << i;
  expect_idle(*arena);
}

// A lease loses tiles, and later ones on its slot do not, although the host has not noticed. The next one returns the
// pages that it does not need, so the one after it has enough. More often than there are generations.
TEST_F(CudaArena, LostPagesDoNotOutliveTheLease) {
  const at::Tensor dense = pre_activation(1'000'003, at::kBFloat16, 0.9, 1),
                   sparse = pre_activation(1'000'003, at::kBFloat16, 0.3, 2);
  const at::Tensor dense_there = dense.to(gpu()), sparse_there = sparse.to(gpu());
  const auto arena = Arena::create(gpu(), fixed_capacity(bytes_of(sparse_there)));
  // With all kernels: loading one for the first time would wait for the device.
  restored_from(compress_copy(*arena, sparse_there), sparse_there);
  expect_idle(*arena);
  constexpr int kRounds = 40;
  at::Tensor of_dense[kRounds], of_sparse[kRounds];
  for (int round = 0; round < kRounds; ++round) {
    of_dense[round] = poisoned_like(dense_there);
    of_sparse[round] = poisoned_like(sparse_there);
  }
  c10::cuda::device_synchronize();
  hold_device();
  const void* slot = nullptr;
  const auto run = [&](const at::Tensor& h, const at::Tensor& restored) {
    const at::Tensor handle = compress_copy(*arena, h);
    if (!slot) slot = slot_of(handle);
    EXPECT_EQ(slot_of(handle), slot);
    lease_of(handle).restore(restored, Activation::relu);
  };
  for (int round = 0; round < kRounds; ++round) {
    run(dense_there, of_dense[round]);
    run(sparse_there, of_sparse[round]);
    run(sparse_there, of_sparse[round]);
  }
  EXPECT_EQ(arena->memory_stats().failures, 0) << "the host was to know nothing yet";
  EXPECT_THROW(arena->memory_stats(true), OutOfArenaMemory);
  EXPECT_GE(arena->memory_stats().failures, kRounds);
  const at::Tensor relu_of_dense = relu_of(dense), relu_of_sparse = relu_of(sparse);
  for (int round = 0; round < kRounds; ++round) {
    ASSERT_GT(lost_tiles(of_dense[round], relu_of_dense), 0) << round;
    ASSERT_TRUE(same_bits(of_sparse[round], relu_of_sparse)) << round;
  }
  expect_idle(*arena);
}

// The same with a spill region: later leases move to device memory as soon as there is some.
TEST_F(CudaArena, SpilledPagesDoNotOutliveTheLease) {
  const at::Tensor dense = pre_activation(1'000'003, at::kBFloat16, 0.9, 1),
                   sparse = pre_activation(1'000'003, at::kBFloat16, 0.3, 2);
  const at::Tensor dense_there = dense.to(gpu()), sparse_there = sparse.to(gpu());
  const at::Tensor relu_of_dense = relu_of(dense), relu_of_sparse = relu_of(sparse);
  const std::int64_t bytes = bytes_of(sparse_there);
  const auto arena = Arena::create(gpu(), fixed_capacity(bytes, 8 << 20));
  compress_copy(*arena, sparse_there);
  expect_idle(*arena);
  for (int round = 0; round < 3; ++round) {
    hold_device();
    const at::Tensor first = restored_from(compress_copy(*arena, dense_there), dense_there);
    const at::Tensor second = restored_from(compress_copy(*arena, sparse_there), sparse_there);
    const at::Tensor handle = compress_copy(*arena, sparse_there);
    const at::Tensor third = restored_from(handle, sparse_there);
    const MemoryStats stats = arena->memory_stats(true);
    EXPECT_EQ(stats.in_use, bytes);
    EXPECT_EQ(stats.spilled, 0);
    EXPECT_EQ(stats.failures, 0);
    ASSERT_TRUE(same_bits(first, relu_of_dense)) << round;
    ASSERT_TRUE(same_bits(second, relu_of_sparse)) << round;
    ASSERT_TRUE(same_bits(third, relu_of_sparse)) << round;
  }
  expect_idle(*arena);
}

// Leases that end in another order than they are to start again, in an arena that just holds them.
TEST_F(CudaArena, EndsInAnyOrderNeedNoMoreRoom) {
  std::vector<at::Tensor> inputs, relus;
  std::int64_t bytes = 0;
  for (double density : {0.9, 0.8, 0.9, 0.02, 0.01, 0.05}) {
    const at::Tensor h = pre_activation(4'000'003, at::kBFloat16, density, 1);
    inputs.push_back(h.to(gpu()));
    relus.push_back(relu_of(h).to(gpu()));
    bytes += bytes_of(inputs.back());
  }
  for (const ArenaOptions& options : {ArenaOptions{}, fixed_capacity(bytes), fixed_capacity(bytes, 8 << 20)}) {
    const auto arena = Arena::create(gpu(), options);
    std::mt19937_64 rng(5);
    for (int step = 0; step < 12; ++step) {
      std::vector<at::Tensor> handles;
      for (const at::Tensor& h : inputs) handles.push_back(compress_copy(*arena, h));
      std::vector<at::Tensor> got;
      for (std::size_t i = 0; i < inputs.size(); ++i) got.push_back(restored_from(handles[i], inputs[i]));
      EXPECT_EQ(arena->memory_stats().spilled, 0);
      if (step % 4 == 1) std::reverse(handles.begin(), handles.end());
      if (step % 4 == 2) std::shuffle(handles.begin(), handles.end(), rng);
      for (at::Tensor& handle : handles) handle.reset();
      for (std::size_t i = 0; i < inputs.size(); ++i) ASSERT_TRUE(same_bits(got[i], relus[i])) << step;
    }
    const MemoryStats stats = arena->memory_stats(true);
    EXPECT_EQ(stats.failures, 0);
    EXPECT_LE(static_cast<double>(stats.capacity), 1.3 * static_cast<double>(bytes));
    expect_idle(*arena);
  }
}

TEST_F(CudaArena, TheHostRunsFarAhead) {
  const at::Tensor h = pre_activation(300'000, at::kBFloat16, 0.3, 1), there = h.to(gpu()), out = at::empty_like(there);
  const auto arena = Arena::create(gpu());
  for (int i = 0; i < 2; ++i) arena->compress(there, out, Codec::tight, Activation::relu);
  const std::int64_t waits = arena->memory_stats(true).waits;
  hold_device();
  constexpr int kPairs = 3000;
  for (int i = 0; i < kPairs; ++i) arena->compress(there, out, Codec::tight, Activation::relu);
  const at::Tensor last = compress_copy(*arena, there);
  const MemoryStats stats = arena->memory_stats(true);
  EXPECT_EQ(stats.in_use, bytes_of(there));
  EXPECT_EQ(stats.high_water, stats.in_use);
  EXPECT_EQ(stats.live_leases, 1);
  EXPECT_EQ(stats.leases_total, kPairs + 3);
  EXPECT_EQ(stats.waits, waits);
  EXPECT_EQ(stats.failures, 0);
  EXPECT_EQ(stats.dense_bytes, 2 * h.numel());
  EXPECT_TRUE(same_bits(restored_from(last, there), relu_of(h)));
}

TEST_F(CudaArena, StreamsTakeTurns) {
  std::vector<at::Tensor> inputs, relus;
  for (double density : {0.02, 0.6, 0.2}) {
    const at::Tensor h = pre_activation(400'000, at::kBFloat16, density, 1);
    inputs.push_back(h.to(gpu()));
    relus.push_back(relu_of(h).to(gpu()));
  }
  const auto arena = Arena::create(gpu());
  const CUDAStream streams[2] = {c10::cuda::getStreamFromPool(false, 0), c10::cuda::getStreamFromPool(false, 0)};
  c10::cuda::device_synchronize();
  std::vector<at::Tensor> got;
  for (int i = 0; i < 60; ++i) {
    const CUDAStreamGuard guard(streams[i % 2]);
    if (i % 7 == 0) at::cuda::sleep(5'000'000);
    const at::Tensor& h = inputs[static_cast<std::size_t>(i) % inputs.size()];
    at::Tensor handle = compress_copy(*arena, h);
    if (i % 3 == 0) {  // read by the other stream
      at::cuda::CUDAEvent compressed;
      compressed.record();
      const CUDAStreamGuard other(streams[1 - i % 2]);
      compressed.block(streams[1 - i % 2]);
      got.push_back(restored_from(handle, h));
    } else {
      got.push_back(restored_from(handle, h));
    }
  }
  c10::cuda::device_synchronize();
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_TRUE(same_bits(got[i], relus[i % relus.size()])) << i;
  expect_idle(*arena);
  EXPECT_EQ(arena->memory_stats().failures, 0);
}

// Two leases one after another in a graph share a slot; what replays leave there is taken up by the next.
TEST_F(CudaArena, GraphReplaysOfChangingDensity) {
  const double densities[] = {0.02, 0.9, 0.3, 0.0, 1.0, 0.1, 0.6};
  std::vector<at::Tensor> inputs, relus;
  for (double density : densities) {
    const at::Tensor h = pre_activation(500'003, at::kBFloat16, density, 1);
    inputs.push_back(h.to(gpu()));
    relus.push_back(relu_of(h).to(gpu()));
  }
  ArenaOptions worst;
  worst.worst_case = true;
  for (const ArenaOptions& options : {ArenaOptions{}, worst}) {
    const auto arena = Arena::create(gpu(), options);
    at::Tensor kept;
    {
      const CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, 0));
      const at::Tensor h[2] = {inputs[0].clone(), inputs[0].clone()};
      const at::Tensor got[2] = {at::empty_like(h[0]), at::empty_like(h[0])};
      at::Tensor eager = compress_copy(*arena, h[0]);
      const void* const eager_slot = slot_of(eager);
      eager.reset();
      c10::cuda::device_synchronize();
      at::cuda::CUDAGraph graph;
      graph.capture_begin();
      at::Tensor first = compress_copy(*arena, h[0]);
      const void* const slot = slot_of(first);
      lease_of(first).restore(got[0], Activation::relu);
      first.reset();
      at::Tensor second = compress_copy(*arena, h[1]);
      EXPECT_EQ(slot_of(second), slot);
      EXPECT_NE(slot, eager_slot) << "a capture takes nothing that isn't its own";
      lease_of(second).restore(got[1], Activation::relu);
      second.reset();
      graph.capture_end();
      for (std::size_t replay = 0; replay < 100; ++replay) {
        const std::size_t which[2] = {replay % inputs.size(), replay * 3 % inputs.size()};
        for (int i = 0; i < 2; ++i) {
          h[i].copy_(inputs[which[i]]);
          got[i].fill_(-7);
        }
        graph.replay();
        if (replay % 10 == 0) {  // eager leases come and go between replays
          const at::Tensor handle = compress_copy(*arena, inputs[which[0]]);
          EXPECT_NE(slot_of(handle), slot);
          ASSERT_TRUE(same_bits(restored_from(handle, h[0]), relus[which[0]])) << replay;
        }
        for (int i = 0; i < 2; ++i) ASSERT_TRUE(same_bits(got[i], relus[which[i]])) << replay;
      }
      const MemoryStats stats = arena->memory_stats(true);
      EXPECT_EQ(stats.in_use, 0) << "nobody owns a lease, though the graph holds pages";
      EXPECT_EQ(stats.live_leases, 0);
      EXPECT_EQ(stats.failures, 0);
      EXPECT_EQ(stats.spilled, 0);
      arena->trim();  // does nothing while there is a graph
      h[0].copy_(inputs[1]);
      graph.replay();
      ASSERT_TRUE(same_bits(got[0], relus[1]));
      graph.reset();
    }
    c10::cuda::device_synchronize();
    expect_idle(*arena);
  }
}

class CountWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};

TEST_F(CudaArena, WarnsOnceOfSpill) {
  const at::Tensor there = pre_activation(4'000'003, at::kBFloat16, 0.5, 1).to(gpu());
  CountWarnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  for (std::size_t arenas = 1; arenas <= 2; ++arenas) {
    const auto arena = Arena::create(gpu(), fixed_capacity(kPage, 8 << 20));
    for (int i = 0; i < 3; ++i) {
      const at::Tensor handle = compress_copy(*arena, there);
      arena->memory_stats(true);
    }
    ASSERT_EQ(warnings.messages.size(), arenas);
    EXPECT_NE(warnings.messages.back().find("Raise Arena(capacity=...)"), std::string::npos)
        << warnings.messages.back();
  }
}

#else

TEST_F(CudaArena, All) {}

#endif

}  // namespace
}  // namespace bitsparse
