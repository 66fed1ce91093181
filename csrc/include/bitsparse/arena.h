// Arenas: the memory that holds compressed activations between forward and backward.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>

#include "bitsparse/format.h"

namespace bitsparse {

enum class Activation : std::uint8_t { relu = 0, relu_squared = 1 };

// How a CUDA arena is sized. By default it follows what it sees: room for the worst case while shapes are new, then the
// measured high-water mark with headroom. At most one of the first three may be set.
struct ArenaOptions {
  std::optional<std::int64_t> capacity;                // bytes, fixed; never grows
  std::optional<double> density_bound;                 // no tensor is expected to be denser than this share (0, 1]
  bool worst_case = false;                             // room for every live lease whatever its data; never waits
  std::int64_t spill_bytes = std::int64_t{256} << 20;  // most pinned host memory to use when the arena is full (CUDA)
};

// Sizes in bytes. Figures follow finished work: what is still queued on the device shows up later.
struct MemoryStats {
  std::int64_t capacity = 0;       // device memory held
  std::int64_t in_use = 0;         // by live leases whose size is known (CUDA: whole pages)
  std::int64_t high_water = 0;     // most in use at once
  std::int64_t spilled = 0;        // of in_use, in pinned host memory
  std::int64_t live_leases = 0;    // leases with an owner
  std::int64_t dense_bytes = 0;    // what the live leases of known size would take uncompressed
  std::int64_t payload_bytes = 0;  // what they really take
  std::int64_t waits = 0;          // times the host waited for the device without being asked to
  std::int64_t growths = 0;
  std::int64_t failures = 0;  // leases that found no room; of a graph's lease each replay that the host saw
  std::int64_t leases_total = 0;
  double payload_ratio = 0;  // payload_bytes / dense_bytes
};

// One device's store of leases. Thread-safe. A lease keeps its arena alive.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  static std::shared_ptr<Arena> create(c10::Device device, const ArenaOptions& options = {});
  virtual ~Arena() = default;

  c10::Device device() const { return device_; }

  // Does not wait for the device unless `synchronize`, which makes the figures exact and raises OutOfArenaMemory if a
  // lease was lost.
  virtual MemoryStats memory_stats(bool synchronize = false) = 0;
  virtual void reset_peak_memory_stats() = 0;

  // Gives memory beyond the high-water mark of the steps since the last call back to PyTorch; waits for the device.
  // Does nothing while leases are live.
  virtual void trim() = 0;

  // Compresses `h` (contiguous) and writes its activation to `out`, which has the same shape and may be `h`. Returns
  // the lease: a small uint8 tensor whose storage owns it. Work goes to the current stream.
  virtual at::Tensor compress(const at::Tensor& h, const at::Tensor& out, Codec codec, Activation activation) = 0;

  // The same in one kernel for h = x wᵀ + bias, which is not written: the activation and the lease. Nothing where there
  // is no such kernel for these operands.
  virtual std::optional<std::tuple<at::Tensor, at::Tensor>> linear_compress(const at::Tensor& x, const at::Tensor& w,
                                                                            const std::optional<at::Tensor>& bias,
                                                                            Codec codec, Activation activation);

 protected:
  explicit Arena(c10::Device device) : device_(device) {}

 private:
  c10::Device device_;
};

// The device's arena, created on first use and never destroyed.
std::shared_ptr<Arena> default_arena(c10::Device device);
bool has_default_arena(c10::Device device);

// What compresses on this thread now: the innermost ArenaGuard's arena of that device, else the default one.
std::shared_ptr<Arena> current_arena(c10::Device device);

// Makes an arena current for this thread and its device.
class ArenaGuard {
 public:
  explicit ArenaGuard(std::shared_ptr<Arena> arena);
  ~ArenaGuard();
  ArenaGuard(const ArenaGuard&) = delete;
  ArenaGuard& operator=(const ArenaGuard&) = delete;

 private:
  const Arena* arena_;
};
// The same for callers without scopes. pop_arena takes the innermost entry of `arena` away, wherever that is, and
// throws if this thread has none.
void push_arena(std::shared_ptr<Arena> arena);
void pop_arena(const Arena& arena);

// Of the default arena; zeros where there is none yet.
MemoryStats memory_stats(c10::Device device, bool synchronize = false);

}  // namespace bitsparse
