#include "cuda/arena.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "bitsparse/error.h"
#include "cuda/capture.h"
#include "cuda/check.h"
#include "cuda/graph_owner.h"
#include "cuda/page_memory.h"
#include "cuda/slot_pool.h"
#include "dtype.h"
#include "launch.h"
#include "lease.h"
#include "sizing.h"

namespace bitsparse::cuda {
namespace {

using c10::cuda::CUDAStream;

constexpr std::int64_t kGrowthPages = 16;  // slabs come in multiples of 2 MiB, as PyTorch's large blocks do

kernels::Epilogue epilogue_of(Activation activation) {
  return activation == Activation::relu ? kernels::Epilogue::relu : kernels::Epilogue::relu_squared;
}

class CudaArena final : public Arena {
 public:
  CudaArena(c10::Device device, const ArenaOptions& options) : Arena(device), options_(options) {}
  ~CudaArena() override;

  MemoryStats memory_stats(bool synchronize) override;
  void reset_peak_memory_stats() override;
  void trim() override;
  at::Tensor compress(const at::Tensor& h, const at::Tensor& out, Codec codec, Activation activation) override;

  void restore(LeaseSlot& slot, const LeaseInfo& info, const at::Tensor& out, Activation activation);
  void gradient(LeaseSlot& slot, const LeaseInfo& info, const at::Tensor& grad, Activation activation);
  void end_lease(LeaseSlot* slot) noexcept;

 private:
  bool fixed() const { return options_.capacity.has_value(); }

  // Everything below runs with mutex_ held and the arena's device current.
  void initialise(CUDAStream stream);
  LeaseSlot* begin(const LeaseInfo& info, CUDAStream stream);
  void ensure_capacity(Sizing::Kind kind, std::int64_t worst, CUDAStream stream, bool capturing);
  void grow(std::int64_t pages, CUDAStream stream);
  bool wait_for_oldest_unfinished();
  void trim_to_high_water(CUDAStream stream);
  void poll();
  void adopt_orphans();
  void enqueue_release(LeaseSlot& slot);
  void note_high_water(const LeaseSlot& slot);
  void raise_failure();
  template <class Work>
  void set_up(CUDAStream stream, Work work);
  template <class Launch>
  void read(LeaseSlot& slot, Launch launch);
  std::int64_t bound_pages(const LeaseInfo& info) const;

  const ArenaOptions options_;
  std::mutex mutex_;
  Sizing sizing_;

  PageMemory pages_;
  SlotPool slots_;
  std::vector<LeaseSlot*> unsettled_;  // in the order of their start; a lease leaves when its pages were seen back
  std::shared_ptr<OrphanedSlots> orphans_ = std::make_shared<OrphanedSlots>();

  // The user's high-water mark: of leases that started since the last reset.
  std::int64_t peak_pages_ = 0;
  Sizing::LeaseId peak_since_ = 0;

  std::string failure_;  // to be raised by the next call
  std::int64_t waits_ = 0, growths_ = 0, failures_ = 0, leases_total_ = 0;
};

class CudaLease final : public Lease {
 public:
  CudaLease(std::shared_ptr<CudaArena> arena, const LeaseInfo& info, LeaseSlot* slot)
      : Lease(info), arena_(std::move(arena)), slot_(slot) {}
  ~CudaLease() override { arena_->end_lease(slot_); }
  void restore(const at::Tensor& out, Activation activation) override {
    arena_->restore(*slot_, info(), out, activation);
  }
  void gradient(const at::Tensor& grad, Activation activation) override {
    arena_->gradient(*slot_, info(), grad, activation);
  }

 private:
  std::shared_ptr<CudaArena> arena_;
  LeaseSlot* slot_;
};

// Arenas whose memory a graph may still use: a graph's end can't be seen in time to free what its last replay uses.
void keep_forever(std::shared_ptr<Arena> arena) {
  static auto* mutex = new std::mutex;
  static auto* kept = new std::set<std::shared_ptr<Arena>>;
  std::lock_guard<std::mutex> lock(*mutex);
  kept->insert(std::move(arena));
}

// The allocator may give memory to other streams as soon as it is freed: what was enqueued has to be done.
CudaArena::~CudaArena() {
  try {
    const c10::cuda::CUDAGuard guard(device());
    RelaxedCapture relaxed;
    for (LeaseSlot* slot : unsettled_)
      if (!capture_of(*slot->home)) check(cudaStreamSynchronize(*slot->home), "destroying an arena");
  } catch (const std::exception&) {
    // The process is ending, or the device has failed.
  }
}

// Work that no capture may record: setting up memory that outlives the graph.
template <class Work>
void CudaArena::set_up(CUDAStream stream, Work work) {
  RelaxedCapture relaxed;  // another thread may be capturing
  if (!capture_of(stream)) return work(stream);
  const CUDAStream side = c10::cuda::getStreamFromPool(false, device().index());
  c10::cuda::CUDAStreamGuard guard(side);
  work(side);
  check(cudaStreamSynchronize(side), "setting up an arena during graph capture");
}

void CudaArena::initialise(CUDAStream stream) {
  if (pages_.pool()) return;
  set_up(stream, [&](CUDAStream on) {
    pages_.initialise(options_.spill_bytes, on);
    if (fixed() && *options_.capacity >= kPageBytes) pages_.grow(*options_.capacity / kPageBytes, on);
    if (fixed() || options_.density_bound) pages_.add_spill_region(on);
    check(cudaStreamSynchronize(on), "creating an arena");  // once; from here on any stream may use the pool
  });
}

void CudaArena::grow(std::int64_t pages, CUDAStream stream) {
  set_up(stream, [&](CUDAStream on) { pages_.grow(pages, on); });
  ++growths_;
}

std::int64_t CudaArena::bound_pages(const LeaseInfo& info) const {
  const DType dtype = dtype_of(info.dtype, "h");
  const std::int64_t worst = pages_of_units(max_payload_units(dtype, info.numel));
  if (!options_.density_bound) return worst;
  const double bytes_per_element = *options_.density_bound * element_bytes(dtype) + 0.125 + 0.01;
  return std::min(
      worst,
      pages_of_bytes(static_cast<std::int64_t>(std::ceil(static_cast<double>(info.numel) * bytes_per_element))) + 1);
}

bool CudaArena::wait_for_oldest_unfinished() {
  const auto oldest =
      std::find_if(unsettled_.begin(), unsettled_.end(), [](LeaseSlot* s) { return !s->finished && !s->capture; });
  if (oldest == unsettled_.end()) return false;
  ++waits_;
  const cudaStream_t home = (*oldest)->home->stream();
  for (int spins = 0; !(*oldest)->record->finished; ++spins) {
    if (spins < 1000) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (capture_of(home)) continue;                   // may not be asked now
    const cudaError_t state = cudaStreamQuery(home);  // a kernel that died would never finish
    if (state == cudaSuccess && !(*oldest)->record->finished) break;
    if (state != cudaErrorNotReady) check(state, "waiting for a compress kernel");
  }
  poll();
  return true;
}

void CudaArena::ensure_capacity(Sizing::Kind kind, std::int64_t worst, CUDAStream stream, bool capturing) {
  if (fixed()) return;
  if (!capturing && sizing_.take_trim_due() && !options_.worst_case && !options_.density_bound) {
    trim_to_high_water(stream);
    pages_.add_spill_region(stream);
  }
  // A replay is not ordered after what the capturing stream did before: when capturing, count as if on a stream of its
  // own.
  const Sizing::StreamId order = capturing ? static_cast<Sizing::StreamId>(this) : stream.stream();
  std::int64_t pages;
  if (options_.worst_case || options_.density_bound) {
    pages = sizing_.worst_case_demand(worst, order);
  } else {
    Sizing::Demand demand = sizing_.demand(kind, worst, order);
    if (demand.may_wait && capturing) demand = {sizing_.worst_case_demand(worst, order), false};
    while (demand.may_wait && demand.pages > pages_.capacity_pages() && wait_for_oldest_unfinished())
      demand = sizing_.demand(kind, worst, order);
    pages = demand.pages;
  }
  if (pages <= pages_.capacity_pages()) return;
  const std::int64_t more = (pages - pages_.capacity_pages() + kGrowthPages - 1) / kGrowthPages * kGrowthPages;
  try {
    grow(more, stream);
  } catch (const c10::OutOfMemoryError&) {
    if (pages_.capacity_pages() == 0 && pages_.spill_pages() == 0)
      throw;  // else try with what there is: a full arena is noticed
  }
}

LeaseSlot* CudaArena::begin(const LeaseInfo& info, CUDAStream stream) {
  const Capture capture = capture_of(stream);
  const DType dtype = dtype_of(info.dtype, "h");
  const std::int64_t worst = bound_pages(info);
  const Sizing::Kind kind = static_cast<Sizing::Kind>(info.numel) * 16 + static_cast<Sizing::Kind>(dtype) * 3 +
                            static_cast<Sizing::Kind>(info.codec);
  ensure_capacity(kind, worst, stream, static_cast<bool>(capture));
  const std::int64_t table = pages_of_units(max_payload_units(dtype, info.numel)) + 1;
  LeaseSlot* slot = nullptr;
  set_up(stream, [&](CUDAStream on) { slot = slots_.take({table, tile_count(dtype, info.numel)}, on); });
  slot->home = stream;
  // Pages taken in advance could be missed by another stream for a moment: only where that costs no tile.
  const bool may_prefill = !fixed() || pages_.spill_pages() > 0;
  slot->prefill = may_prefill ? static_cast<std::uint32_t>(std::min(worst, sizing_.expected_pages(kind))) : 0;
  slot->dense_bytes = info.numel * element_bytes(dtype);
  slot->id = sizing_.start(kind, worst, stream.stream());
  if (capture) {
    slot->capture = capture.id;
    sizing_.pin(slot->id);
    own_by_graph(capture.graph, slot, orphans_);
    keep_forever(shared_from_this());
  }
  if (info.numel == 0) {
    slot->record->finished = 1;
  }
  unsettled_.push_back(slot);
  ++leases_total_;
  if (!capture) pages_.wait_for_growth(stream);
  return slot;
}

at::Tensor CudaArena::compress(const at::Tensor& h, const at::Tensor& out, Codec codec, Activation activation) {
  const c10::cuda::CUDAGuard guard(device());
  const CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const LeaseInfo info{h.numel(), h.scalar_type(), codec, device()};
  LeaseSlot* slot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    initialise(stream);
    poll();
    raise_failure();
    slot = begin(info, stream);
  }
  auto lease = std::make_unique<CudaLease>(std::static_pointer_cast<CudaArena>(shared_from_this()), info, slot);
  if (info.numel > 0) {
    kernels::BlobStore store = slot->store(pages_.pool(), kPageShift);
    if (slot->capture) {  // a replay finds the slot as the last one left it
      kernels::BlobStore unrecorded = store;
      unrecorded.record = nullptr;
      check(kernels::release(unrecorded, stream), "preparing a captured lease");
    }
    check(kernels::compress(h.data_ptr(), out.data_ptr(), info.numel, dtype_of(info.dtype, "h"), codec, Keep::positive,
                            epilogue_of(activation), store, stream),
          "compress");
  }
  return make_handle(std::move(lease), slot->base());
}

template <class Launch>
void CudaArena::read(LeaseSlot& slot, Launch launch) {
  const c10::cuda::CUDAGuard guard(device());
  const CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    poll();
    raise_failure();
  }
  launch(slot.store(pages_.pool(), kPageShift), stream);
  if (stream == *slot.home) return;
  std::lock_guard<std::mutex> lock(mutex_);
  auto reader =
      std::find_if(slot.readers.begin(), slot.readers.end(), [&](const auto& r) { return r.first == stream; });
  if (reader == slot.readers.end()) reader = slot.readers.emplace(slot.readers.end(), stream, at::cuda::CUDAEvent());
  reader->second.record(stream);
}

void CudaArena::restore(LeaseSlot& slot, const LeaseInfo& info, const at::Tensor& out, Activation activation) {
  read(slot, [&](const kernels::BlobStore& store, CUDAStream stream) {
    if (info.numel == 0) return;
    check(kernels::restore(out.data_ptr(), info.numel, dtype_of(info.dtype, "out"), info.codec, Keep::positive,
                           epilogue_of(activation), store, stream),
          "restore");
  });
}

void CudaArena::gradient(LeaseSlot& slot, const LeaseInfo& info, const at::Tensor& grad, Activation activation) {
  read(slot, [&](const kernels::BlobStore& store, CUDAStream stream) {
    if (info.numel == 0) return;
    check(kernels::gradient(grad.data_ptr(), info.numel, dtype_of(info.dtype, "grad"), info.codec,
                            epilogue_of(activation), store, stream),
          "gradient");
  });
}

void CudaArena::enqueue_release(LeaseSlot& slot) {
  for (auto& [stream, event] : slot.readers) event.block(*slot.home);
  slot.readers.clear();
  kernels::BlobStore store = slot.store(pages_.pool(), kPageShift);
  if (slot.capture) store.record = nullptr;  // the host never sees a replay's release
  check(kernels::release(store, *slot.home), "release");
}

void CudaArena::end_lease(LeaseSlot* slot) noexcept {
  try {
    const c10::cuda::CUDAGuard guard(device());
    std::lock_guard<std::mutex> lock(mutex_);
    slot->ending = true;
    sizing_.ending(slot->id);
    const Capture capture = capture_of(*slot->home);
    if (capture.id == slot->capture) {
      enqueue_release(*slot);
      slot->release_enqueued = true;
    }
    // Else either a capture is recording this stream and must not record the release of a lease that isn't its own: the
    // next poll outside of it does it. Or a graph owns the lease: each replay starts by releasing what the last one
    // left.
  } catch (const std::exception&) {
    // The process is ending and the CUDA context with it, or the device has failed, which the next call will report.
  }
}

void CudaArena::adopt_orphans() {
  for (LeaseSlot* slot : orphans_->take()) {
    slot->capture = 0;
    slot->release_enqueued = false;
    sizing_.unpin(slot->id);
  }
}

void CudaArena::poll() {
  adopt_orphans();
  std::size_t kept = 0;
  for (LeaseSlot* slot : unsettled_) {
    volatile kernels::LeaseRecord& record = *slot->record;
    const bool released = record.released;
    if (slot->ending && !slot->release_enqueued && !slot->capture && !capture_of(*slot->home)) {
      enqueue_release(*slot);
      slot->release_enqueued = true;
    }
    if (record.finished && (!slot->finished || slot->capture)) {
      std::atomic_thread_fence(std::memory_order_acquire);
      slot->units = static_cast<std::int64_t>(record.units);
      note_high_water(*slot);
      if (!slot->finished) sizing_.finish(slot->id, pages_of_units(slot->units));
      slot->finished = true;
    }
    if (record.lost_tiles && slot->finished) {
      record.lost_tiles = 0;
      ++failures_;
      failure_ =
          c10::str("the arena of ", device(), " was full: a lease of ", slot->dense_bytes, " bytes dense needed ",
                   slot->units * kUnitBytes, " bytes; the arena's capacity is ", pages_.capacity_pages() * kPageBytes,
                   " bytes and ", pages_.spill_pages() * kPageBytes, " bytes of spill. Its gradients are NaN. ",
                   fixed()                  ? "Raise Arena(capacity=...)"
                   : options_.density_bound ? "Raise Arena(density_bound=...)"
                                            : "Raise Arena(spill_bytes=...) or set worst_case=True");
    }
    if (released && slot->ending) {
      note_high_water(*slot);
      sizing_.end(slot->id);
      slots_.give_back(slot);
    } else {
      unsettled_[kept++] = slot;
    }
  }
  unsettled_.resize(kept);
}

void CudaArena::note_high_water(const LeaseSlot& slot) {
  const std::int64_t pages = slot.record->high_water;
  sizing_.note_high_water(pages);
  if (slot.id > peak_since_) peak_pages_ = std::max(peak_pages_, pages);
}

void CudaArena::raise_failure() {
  if (failure_.empty()) return;
  const std::string what = std::exchange(failure_, {});
  throw OutOfArenaMemory(what);
}

void CudaArena::trim_to_high_water(CUDAStream stream) {
  const auto in_use = [](LeaseSlot* s) { return !s->ending || s->capture || capture_of(*s->home); };
  if (std::any_of(unsettled_.begin(), unsettled_.end(), in_use)) return;
  if (!unsettled_.empty()) ++waits_;
  for (LeaseSlot* slot : unsettled_) check(cudaStreamSynchronize(*slot->home), "waiting for leases to end");
  poll();
  if (!unsettled_.empty()) return;
  const std::int64_t pages = sizing_.steady_pages();  // now that all of the step is known
  if (pages >= pages_.capacity_pages()) return;
  pages_.rebuild(pages, stream);  // nothing in flight uses a page
}

void CudaArena::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!pages_.pool() || fixed()) return;
  const c10::cuda::CUDAGuard guard(device());
  poll();
  trim_to_high_water(c10::cuda::getCurrentCUDAStream());
}

MemoryStats CudaArena::memory_stats(bool synchronize) {
  std::lock_guard<std::mutex> lock(mutex_);
  MemoryStats stats;
  if (pages_.pool()) {
    const c10::cuda::CUDAGuard guard(device());
    poll();
    if (synchronize) {
      check(cudaDeviceSynchronize(), "memory_stats(synchronize=True)");
      poll();
      raise_failure();
    }
  }
  stats.capacity = pages_.capacity_pages() * kPageBytes;
  stats.in_use = sizing_.known_pages() * kPageBytes;
  peak_pages_ = std::max(peak_pages_, sizing_.known_pages());  // kernels report a lease's peak when it ends
  stats.high_water = peak_pages_ * kPageBytes;
  stats.live_leases = sizing_.live();
  for (const LeaseSlot* slot : unsettled_) {
    stats.spilled += static_cast<std::int64_t>(slot->record->spilled_pages) * kPageBytes;
    if (!slot->finished || slot->ending) continue;
    stats.dense_bytes += slot->dense_bytes;
    stats.payload_bytes += slot->units * kUnitBytes;
  }
  stats.payload_ratio =
      stats.dense_bytes ? static_cast<double>(stats.payload_bytes) / static_cast<double>(stats.dense_bytes) : 0;
  stats.waits = waits_;
  stats.growths = growths_;
  stats.failures = failures_;
  stats.leases_total = leases_total_;
  return stats;
}

void CudaArena::reset_peak_memory_stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!pages_.pool()) return;
  const c10::cuda::CUDAGuard guard(device());
  poll();
  check(kernels::reset_high_water(pages_.pool(), c10::cuda::getCurrentCUDAStream()), "resetting an arena's peak");
  peak_since_ = sizing_.last_id();
  peak_pages_ = sizing_.known_pages();
}

}  // namespace

std::shared_ptr<Arena> make_arena(c10::Device device, const ArenaOptions& options) {
  TORCH_CHECK_VALUE(device.index() < c10::cuda::device_count(),
                    "bitsparse: expected a CUDA device below cuda:", static_cast<int>(c10::cuda::device_count()),
                    ", got ", device);
  return std::make_shared<CudaArena>(device, options);
}

c10::DeviceIndex current_device() { return c10::cuda::current_device(); }

}  // namespace bitsparse::cuda
