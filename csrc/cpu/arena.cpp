#include "cpu/arena.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <mutex>

#include "activation.h"
#include "bitsparse/error.h"
#include "cpu/codec.h"
#include "cpu/huge_pages.h"
#include "dtype.h"
#include "lease.h"

namespace bitsparse::cpu {
namespace {

class CpuArena final : public Arena {
 public:
  explicit CpuArena(const ArenaOptions& options) : Arena(c10::kCPU), options_(options) {}

  MemoryStats memory_stats(bool) override {
    std::lock_guard<std::mutex> lock(mutex_);
    MemoryStats stats = stats_;
    stats.capacity = options_.capacity.value_or(stats.in_use);
    stats.payload_bytes = stats.in_use;
    stats.payload_ratio =
        stats.dense_bytes ? static_cast<double>(stats.in_use) / static_cast<double>(stats.dense_bytes) : 0;
    return stats;
  }
  void reset_peak_memory_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.high_water = stats_.in_use;
  }
  void trim() override {}

  at::Tensor compress(const at::Tensor& h, const at::Tensor& out, Codec codec, Activation activation) override;

  void begin(std::int64_t bytes, std::int64_t dense_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (options_.capacity && stats_.in_use + bytes > *options_.capacity) {
      ++stats_.failures;
      throw OutOfArenaMemory(c10::str("the arena of cpu is full: a lease needs ", bytes, " bytes, ", stats_.in_use,
                                      " of its ", *options_.capacity, " bytes are in use. Raise Arena(capacity=...)"));
    }
    stats_.in_use += bytes;
    stats_.dense_bytes += dense_bytes;
    stats_.high_water = std::max(stats_.high_water, stats_.in_use);
    ++stats_.live_leases;
    ++stats_.leases_total;
  }
  void end(std::int64_t bytes, std::int64_t dense_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.in_use -= bytes;
    stats_.dense_bytes -= dense_bytes;
    --stats_.live_leases;
  }

 private:
  ArenaOptions options_;
  std::mutex mutex_;
  MemoryStats stats_;
};

class CpuLease final : public Lease {
 public:
  CpuLease(std::shared_ptr<CpuArena> arena, const LeaseInfo& info, at::Tensor packed)
      : Lease(info), arena_(std::move(arena)), packed_(std::move(packed)), bytes_(packed_.numel()) {
    arena_->begin(bytes_, dense_bytes());
  }
  ~CpuLease() override { arena_->end(bytes_, dense_bytes()); }

  void restore(const at::Tensor& out, Activation activation) override {
    advise_huge_pages(out.data_ptr(), static_cast<std::int64_t>(out.nbytes()));
    unpack(packed_, out.data_ptr());
    at::Tensor relu = out;
    activate_relu_(relu, activation);
  }
  void gradient(const at::Tensor& grad, Activation activation) override {
    const at::Tensor relu = at::empty_like(grad);
    unpack(packed_, relu.data_ptr());
    grad.copy_(activation_gradient(relu, grad, activation));
  }
  void* handle_data() { return handle_data_; }

 private:
  std::int64_t dense_bytes() const { return info().numel * static_cast<std::int64_t>(c10::elementSize(info().dtype)); }

  std::shared_ptr<CpuArena> arena_;
  at::Tensor packed_;
  std::int64_t bytes_;
  alignas(16) std::uint8_t handle_data_[kHandleBytes] = {};
};

at::Tensor CpuArena::compress(const at::Tensor& h, const at::Tensor& out, Codec codec, Activation activation) {
  at::Tensor activated = out;
  if (!out.is_same(h)) activated.copy_(h);
  relu_(activated);  // first: relu may give NaNs bits of its own, and backward must see those
  at::Tensor packed = pack(activated, dtype_of(h.scalar_type(), "h"), codec, Keep::positive);
  auto lease = std::make_unique<CpuLease>(std::static_pointer_cast<CpuArena>(shared_from_this()),
                                          LeaseInfo{h.numel(), h.scalar_type(), codec, h.device()}, std::move(packed));
  activate_relu_(activated, activation);
  void* data = lease->handle_data();
  return make_handle(std::move(lease), data);
}

}  // namespace

std::shared_ptr<Arena> make_arena(const ArenaOptions& options) { return std::make_shared<CpuArena>(options); }

}  // namespace bitsparse::cpu
