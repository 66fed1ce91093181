// How leases begin, end and pass their pages on.
//
// A lease that ends launches nothing: its slot keeps control and pages, and the next compress of the same size on the
// same stream works on them. Only pages that would be missing elsewhere are returned, by a release kernel: flushed.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <set>

#include "cuda/check.h"
#include "cuda/cuda_arena.h"
#include "dtype.h"

namespace bitsparse::cuda {

using c10::cuda::CUDAStream;
using Phase = LeaseState::Phase;

namespace {

// Arenas whose memory a graph may still use: a graph's end can't be seen in time to free what its last replay uses.
void keep_forever(std::shared_ptr<Arena> arena) {
  static auto* mutex = new std::mutex;
  static auto* kept = new std::set<std::shared_ptr<Arena>>;
  std::lock_guard<std::mutex> lock(*mutex);
  kept->insert(std::move(arena));
}

// No kernel that is enqueued writes the lease's record.
bool is_over(const LeaseState& lease) {
  switch (lease.phase) {
    case Phase::over: return true;
    case Phase::flushing: return lease.record->released;
    case Phase::taken_over:
      return !lease.capture && (lease.successor->record->finished || lease.successor->record->released);
    default: return false;
  }
}

}  // namespace

// The allocator may give memory to other streams as soon as it is freed: what was enqueued has to be done.
CudaArena::~CudaArena() {
  try {
    const c10::cuda::CUDAGuard guard(device());
    RelaxedCapture relaxed;
    take_ended();
    flush_all();  // the streams then wait for readers on other streams
    for (const auto& lease : leases_)
      if (!capture_of(lease->home)) check(cudaStreamSynchronize(lease->home), "destroying an arena");
  } catch (const std::exception&) {
    // The process is ending, or the device has failed.
  }
}

LeaseState& CudaArena::begin(const LeaseInfo& info, CUDAStream stream) {
  // What is empty has no kernels, so no part in captures or in handing on pages.
  const Capture capture = info.numel ? capture_of(stream) : Capture{};
  const DType dtype = dtype_of(info.dtype, "h");
  Sizing::Request request{};
  request.kind = static_cast<Sizing::Kind>(info.numel) * 16 + static_cast<Sizing::Kind>(dtype) * 3 +
                 static_cast<Sizing::Kind>(info.codec);
  request.worst = bound_pages(info);
  request.stream = stream.stream();
  request.captured = static_cast<bool>(capture);
  const SlotClass size =
      SlotPool::class_of(pages_of_units(max_payload_units(dtype, info.numel)), tile_count(dtype, info.numel));

  LeaseState* before = nullptr;
  if (info.numel) {
    if (!capture) trim_if_due(stream);
    // No order between their next use and this stream's work, so their pages count as in use until they are back.
    flush_if([&](const LeaseState& warm) { return capture || warm.home != stream; });
    before = find_warm({stream, size, capture.id});
    if (before) request.takes_over = before->id;
    ensure_capacity(request, stream);
    if (!before || !may_stay_warm(request)) flush_if([&](const LeaseState& warm) { return &warm != before; });
  }

  LeaseSlot* const slot = before ? before->slot : new_slot(size, stream);
  auto fresh = std::make_unique<LeaseState>(stream, slot, records_.take());
  LeaseState& lease = *fresh;
  if (capture) {
    own_by_graph(capture.graph, &lease, orphans_);
    keep_forever(shared_from_this());
  }
  leases_.push_back(std::move(fresh));
  lease.capture = capture.id;
  lease.numel = info.numel;
  lease.dense_bytes = info.numel * element_bytes(dtype);
  lease.id = sizing_.start(request);
  if (before) take_over(*before, lease);
  if (info.numel == 0) lease.record->finished = 1;
  ++leases_total_;
  if (!capture) pages_.wait_for_growth(stream);
  return lease;
}

// Spilled pages are slow and lost ones may be had again: such slots start afresh. (A graph's can't: its kernels look
// for better pages themselves, as those do whose record the host has not seen yet.)
LeaseState* CudaArena::find_warm(const WarmSlots::Key& key) {
  if (!key.capture)
    flush_if([&](const LeaseState& warm) { return (warm.lost_tiles || warm.spilled) && warm.home == key.home; });
  return warm_.find(key);
}

void CudaArena::take_over(LeaseState& old, LeaseState& fresh) {
  wait_for_readers(old);
  warm_.remove(&old);
  old.phase = Phase::taken_over;
  old.slot = nullptr;
  old.successor = &fresh;
  fresh.has_predecessor = true;
}

void CudaArena::wait_for_readers(LeaseState& lease) {
  for (LeaseState::Reader& reader : lease.readers)
    if (reader.capture == lease.capture) reader.read.block(lease.home);
  lease.readers.clear();
}

template <class Predicate>
void CudaArena::flush_if(Predicate wanted) {
  const auto can_and_should = [&](const LeaseState& warm) {
    return wanted(warm) && !warm.capture && !capture_of(warm.home);
  };
  for (LeaseState* lease : warm_.take_if(can_and_should)) {
    wait_for_readers(*lease);
    check(kernels::release(lease->slot->store(pages_.pool(), kPageShift, lease->record), lease->home), "release");
    lease->phase = Phase::flushing;
    sizing_.flushing(lease->id);
  }
}

void CudaArena::flush_all() {
  flush_if([](const LeaseState&) { return true; });
}

void CudaArena::end_lease(LeaseState& lease) noexcept {
  try {
    CaptureId capture = 0;
    if (lease.capture) {
      const c10::cuda::CUDAGuard guard(device());
      capture = capture_of(lease.home).id;
    }
    ended_.add({&lease, capture});
  } catch (const std::exception&) {
    // The process is ending and the CUDA context with it, or the device has failed, which the next call will report.
  }
}

void CudaArena::take_ended() {
  for (const EndedLease& ended : ended_.take()) {
    LeaseState& lease = *ended.lease;
    sizing_.ending(lease.id);
    lease.phase = lease.numel ? Phase::kept : Phase::over;
    if (lease.numel == 0) continue;
    // Later compressions of the same capture may have the slot. Where the lease ends outside of it, each replay goes on
    // writing to the slot after that end.
    if (lease.capture && lease.capture != ended.capture) continue;
    warm_.add(&lease);
  }
}

// Their graph is gone and its last replay is through.
void CudaArena::adopt_orphans() {
  for (LeaseState* lease : orphans_->take()) {
    lease->capture = 0;
    sizing_.unpin(lease->id);
    lease->readers.erase(std::remove_if(lease->readers.begin(), lease->readers.end(),
                                        [](const LeaseState::Reader& reader) { return reader.capture != 0; }),
                         lease->readers.end());
    if (lease->phase == Phase::taken_over) {
      lease->successor->has_predecessor = false;
      lease->successor = nullptr;
      lease->phase = Phase::over;
    } else if (lease->phase == Phase::kept) {
      warm_.remove(lease);
      warm_.add(lease);
      flush_if([&](const LeaseState& warm) { return &warm == lease; });
    }
  }
}

void CudaArena::poll() {
  take_ended();
  adopt_orphans();
  std::size_t kept = 0;
  for (auto& lease : leases_) {
    const bool over = is_over(*lease);  // before its record is read for the last time
    std::atomic_thread_fence(std::memory_order_acquire);
    read_record(*lease);
    if (over && !lease->has_predecessor) {
      settle(*lease);
      lease.reset();
    } else {
      std::swap(leases_[kept++], lease);
    }
  }
  leases_.resize(kept);
}

void CudaArena::settle(LeaseState& lease) {
  sizing_.end(lease.id);
  if (lease.successor) lease.successor->has_predecessor = false;
  if (lease.slot) slots_.give_back(lease.slot);
  records_.give_back(lease.record);
}

void CudaArena::read_record(LeaseState& lease) {
  volatile kernels::LeaseRecord& record = *lease.record;
  if (record.finished && (!lease.finished || lease.capture)) {
    std::atomic_thread_fence(std::memory_order_acquire);
    const auto units = static_cast<std::int64_t>(record.units);
    if (!lease.finished || units != lease.units) sizing_.finish(lease.id, pages_of_units(units));
    lease.units = units;
    lease.finished = true;
  }
  if (const std::uint32_t pages = record.high_water; pages != lease.high_water) {
    lease.high_water = pages;
    sizing_.note_high_water(pages);
    if (lease.id > peak_since_) peak_pages_ = std::max<std::int64_t>(peak_pages_, pages);
  }
  if (!lease.finished) return;
  // The same loss may be counted on for a while, and a graph's from replay to replay.
  if (const std::uint32_t lost = record.lost_tiles;
      lost != lease.lost_tiles && (lease.lost_tiles == 0 || lease.capture)) {
    if (std::exchange(lease.lost_tiles, lost) == 0) sizing_.note_loss(pages_of_units(lease.units));
    ++failures_;
    failure_ = c10::str("the arena of ", device(), " was full: a lease of ", lease.dense_bytes, " bytes dense needed ",
                        lease.units * kUnitBytes, " bytes; the arena's capacity is ",
                        pages_.capacity_pages() * kPageBytes, " bytes and ", pages_.spill_pages() * kPageBytes,
                        " bytes of spill. Its gradients are NaN. ", advice_on_loss());
  }
  if (record.has_spilled && !lease.spilled) {
    lease.spilled = true;
    if (!std::exchange(warned_, true))
      warning_ = c10::str(
          "bitsparse: the arena of ", device(), " was full: part of a lease of ", lease.dense_bytes,
          " bytes dense is in pinned host memory. Results are exact, but steps are slower. The arena's capacity is ",
          pages_.capacity_pages() * kPageBytes, " bytes. ", advice_on_spill());
  }
}

}  // namespace bitsparse::cuda
