// How large a CUDA arena is: growing without waiting, waiting only while sizes are new, and trimming.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "cuda/check.h"
#include "cuda/cuda_arena.h"
#include "dtype.h"

namespace bitsparse::cuda {

using c10::cuda::CUDAStream;

namespace {

constexpr std::int64_t kLeasesBeforeAskingAgain = 64;
constexpr std::int64_t kGrowthPages = 4;  // slabs come in multiples of 2 MiB, as PyTorch's large blocks do

// For what no capture may record. A stream of our own, as any of PyTorch's pool may be the one that captures, and for
// the life of the process, as PyTorch's allocator remembers which stream memory belongs to.
CUDAStream uncaptured_stream(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, CUDAStream> streams;
  std::lock_guard lock(mutex);
  auto found = streams.find(device);
  if (found == streams.end()) {
    c10::cuda::CUDAGuard guard(device);
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
    found = streams.emplace(device, c10::cuda::getStreamFromExternal(stream, device)).first;
  }
  return found->second;
}

}  // namespace

// Work that no capture may record: setting up memory that outlives the graph.
template <class Work>
void CudaArena::set_up(CUDAStream stream, Work work) {
  RelaxedCapture relaxed;  // another thread may be capturing
  if (!capture_of(stream)) return work(stream);
  const CUDAStream side = uncaptured_stream(device().index());
  c10::cuda::CUDAStreamGuard guard(side);
  work(side);
  check(cudaStreamSynchronize(side), "setting up an arena during graph capture");
}

void CudaArena::initialise(CUDAStream stream) {
  if (ready_) return;
  set_up(stream, [&](CUDAStream on) {
    if (!pages_.pool()) pages_.initialise(options_.spill_bytes, on);
    if (!fixed() && !has_bound()) pages_.prepare_spill_region();  // the second step will want it
    if (fixed() && *options_.capacity >= kPageBytes) pages_.grow(*options_.capacity / kPageBytes, on);
    if (fixed() || options_.density_bound) pages_.add_spill_region(on);
    check(cudaStreamSynchronize(on), "creating an arena");  // once; from here on any stream may use the pool
  });
  ready_ = true;  // if PyTorch had no memory the next call tries again
}

LeaseSlot* CudaArena::new_slot(const SlotClass& size, CUDAStream stream) {
  LeaseSlot* slot = nullptr;
  set_up(stream, [&](CUDAStream on) { slot = slots_.take(size, on); });
  return slot;
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

// The host's run-ahead is held back; the device has work. Of leases that ended on `stream` no size is needed.
bool CudaArena::wait_for_oldest_unfinished(CUDAStream stream) {
  using Phase = LeaseState::Phase;
  const auto oldest = std::find_if(leases_.begin(), leases_.end(), [&](const auto& lease) {
    return !lease->finished && !lease->capture && lease->phase != Phase::taken_over &&
           (lease->phase == Phase::live || lease->home != stream);
  });
  if (oldest == leases_.end()) return false;
  ++waits_;
  volatile kernels::LeaseRecord& record = *(*oldest)->record;
  const cudaStream_t home = (*oldest)->home.stream();
  for (int spins = 0; !record.finished; ++spins) {
    if (spins < 1000) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (capture_of(home)) continue;                   // may not be asked now
    const cudaError_t state = cudaStreamQuery(home);  // a kernel that died would never finish
    if (state == cudaSuccess && !record.finished) return false;
    if (state != cudaErrorNotReady) check(state, "waiting for a compress kernel");
  }
  poll();
  return true;
}

void CudaArena::ensure_capacity(const Sizing::Request& request, CUDAStream stream) {
  if (fixed()) return;
  std::int64_t pages;
  if (has_bound()) {
    pages = sizing_.worst_case_demand(request);
  } else {
    Sizing::Demand demand = sizing_.demand(request);
    // Sizes may be more than expected only where there is a spill region.
    if (request.captured && (demand.may_wait || pages_.spill_pages() == 0))
      demand = {sizing_.worst_case_demand(request), false};
    while (demand.may_wait && demand.pages > pages_.capacity_pages() && wait_for_oldest_unfinished(stream))
      demand = sizing_.demand(request);  // meanwhile other threads may have ended the step that brought the shape
    if (!request.captured && !demand.may_wait && pages_.spill_pages() == 0)
      set_up(stream, [&](CUDAStream on) { pages_.add_spill_region(on); });
    pages = demand.pages;
  }
  // Each refusal makes PyTorch empty its cache and wait for the device: not for every lease.
  const bool refused = leases_total_ < ask_again_at_ && sizing_.live() > 0;
  if (pages > pages_.capacity_pages() && !refused) grow(pages - pages_.capacity_pages(), stream);
}

// As far as PyTorch has memory. Worst cases seldom come, and a full arena is noticed: what there is may do.
void CudaArena::grow(std::int64_t pages, CUDAStream stream) {
  std::exception_ptr refusal;
  for (std::int64_t slabs = (pages + kGrowthPages - 1) / kGrowthPages; slabs > 0; slabs /= 2) {
    try {
      set_up(stream, [&](CUDAStream on) { pages_.grow(slabs * kGrowthPages, on); });
      ++growths_;
      break;
    } catch (const c10::OutOfMemoryError&) {
      refusal = std::current_exception();
    }
  }
  if (!refusal) return;
  set_up(stream, [&](CUDAStream on) { pages_.add_spill_region(on); });
  if (pages_.capacity_pages() == 0 && pages_.spill_pages() == 0) std::rethrow_exception(refusal);
  ask_again_at_ = leases_total_ + kLeasesBeforeAskingAgain;
}

// Sizes may be relied on to be what they were the last time where nothing is lost if they are not.
bool CudaArena::may_stay_warm(const Sizing::Request& request) const {
  const bool certain = has_bound() || pages_.spill_pages() == 0;
  return sizing_.may_keep(request, pages_.capacity_pages(), certain);
}

void CudaArena::trim_if_due(CUDAStream stream) {
  if (fixed() || !sizing_.take_trim_due() || has_bound()) return;
  trim_to_high_water(stream, /*asked=*/false);
}

void CudaArena::trim_to_high_water(CUDAStream stream, bool asked) {
  const auto in_use = [](const auto& lease) {
    return lease->phase == LeaseState::Phase::live || lease->capture || capture_of(lease->home);
  };
  if (std::any_of(leases_.begin(), leases_.end(), in_use)) return;
  flush_all();
  if (!leases_.empty() && !asked) ++waits_;
  for (const auto& lease : leases_) check(cudaStreamSynchronize(lease->home), "waiting for leases to end");
  poll();
  if (!leases_.empty()) return;
  // Now all of the step is known, and nothing in flight uses a page.
  if (asked) {
    sizing_.forget_older_high_water();
    check(kernels::reset_high_water(pages_.pool(), stream), "trimming an arena");
    check(cudaStreamSynchronize(stream), "trimming an arena");
  }
  const std::int64_t pages = sizing_.steady_pages();
  if (pages >= pages_.capacity_pages()) return;
  try {
    pages_.rebuild(pages, stream);
  } catch (const c10::OutOfMemoryError&) {
    // Not in one slab. The next lease asks for what it needs.
  }
}

void CudaArena::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!pages_.pool() || fixed()) return;
  const c10::cuda::CUDAGuard guard(device());
  poll();
  trim_to_high_water(c10::cuda::getCurrentCUDAStream(), /*asked=*/true);
}

std::string CudaArena::advice_on_loss() const {
  return fixed()                  ? "Raise Arena(capacity=...)"
         : options_.density_bound ? "Raise Arena(density_bound=...)"
                                  : "Raise Arena(spill_bytes=...) or set worst_case=True";
}

std::string CudaArena::advice_on_spill() const {
  return fixed()                  ? "Raise Arena(capacity=...)"
         : options_.density_bound ? "Raise Arena(density_bound=...)"
         : options_.worst_case    ? "PyTorch had no more memory to give it"
                                  : "It grows by itself; if that is too late again and again, set "
                                    "Arena(density_bound=...) or Arena(worst_case=True)";
}

}  // namespace bitsparse::cuda
