#include "cuda/arena.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <mutex>
#include <string>

#include "bitsparse/error.h"
#include "cuda/check.h"
#include "cuda/cuda_arena.h"
#include "cuda/epilogue.h"
#include "cuda/nvtx.h"
#include "dtype.h"
#include "launch.h"

namespace bitsparse::cuda {

using c10::cuda::CUDAStream;

namespace {

class CudaLease final : public Lease {
 public:
  CudaLease(std::shared_ptr<CudaArena> arena, const LeaseInfo& info, LeaseState& state)
      : Lease(info), arena_(std::move(arena)), state_(state) {}
  ~CudaLease() override { arena_->end_lease(state_); }
  void restore(const at::Tensor& out, Activation activation) override {
    arena_->restore(state_, info(), out, activation);
  }
  void gradient(const at::Tensor& grad, Activation activation) override {
    arena_->gradient(state_, info(), grad, activation);
  }
  std::optional<at::Tensor> linear_gradient(const at::Tensor& grad, const at::Tensor& w,
                                            Activation activation) override {
    return arena_->linear_gradient(state_, info(), grad, w, activation);
  }

 private:
  std::shared_ptr<CudaArena> arena_;
  LeaseState& state_;
};

bool is_aligned(const at::Tensor& t) { return reinterpret_cast<std::uintptr_t>(t.data_ptr()) % kChunkBytes == 0; }

// Is the tensor as the kernels want operands of products?
bool is_plain(const at::Tensor& t, c10::Device device) {
  return t.device() == device && t.scalar_type() == at::kBFloat16 && t.is_contiguous() && is_aligned(t);
}

// Never under the arena's lock: whoever handles warnings may want Python's.
void give(const std::string& warning) {
  if (!warning.empty()) TORCH_WARN(warning);
}

}  // namespace

// A new lease, whose kernel `launch` enqueues.
template <class Launch>
at::Tensor CudaArena::write(const LeaseInfo& info, const char* what, Launch launch) {
  const c10::cuda::CUDAGuard guard(device());
  const CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  LeaseState* state;
  std::string warning;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    initialise(stream);
    poll();
    raise_failure();
    state = &begin(info, stream);
    warning.swap(warning_);
  }
  auto lease = std::make_unique<CudaLease>(std::static_pointer_cast<CudaArena>(shared_from_this()), info, *state);
  give(warning);
  if (info.numel > 0) {
    const cudaError_t launched =
        launch(state->slot->store(pages_.pool(), kPageShift, state->record, info.columns), stream);
    if (launched != cudaSuccess) state->record->finished = 1;  // no kernel will say so
    check(launched, what);
  }
  return make_handle(std::move(lease), state->slot->base());
}

at::Tensor CudaArena::compress(const at::Tensor& h, const at::Tensor& out, Codec codec, Activation activation) {
  const NvtxRange range("compress");
  const LeaseInfo info{h.numel(), h.scalar_type(), codec, device()};
  return write(info, "compress", [&](const kernels::BlobStore& store, CUDAStream stream) {
    return kernels::compress(h.data_ptr(), out.data_ptr(), info.numel, dtype_of(info.dtype, "h"), codec, Keep::positive,
                             epilogue_of(activation), store, stream);
  });
}

std::optional<std::tuple<at::Tensor, at::Tensor>> CudaArena::linear_compress(const at::Tensor& x, const at::Tensor& w,
                                                                             const std::optional<at::Tensor>& bias,
                                                                             Codec codec, Activation activation) {
  const std::int64_t rows = x.size(0), depth = x.size(1), columns = w.size(0);
  const cudaDeviceProp* const properties = at::cuda::getDeviceProperties(device().index());
  if (!is_plain(x, device()) || !is_plain(w, device()) || (bias && !is_plain(*bias, device())) ||
      !kernels::linear_compresses(rows, columns, depth, properties->major, properties->minor))
    return std::nullopt;
  const NvtxRange range("linear_compress");
  const at::Tensor out = at::empty({rows, columns}, x.options());
  const LeaseInfo info{rows * columns, at::kBFloat16, codec, device(), columns};
  const at::Tensor lease = write(info, "linear_compress", [&](const kernels::BlobStore& store, CUDAStream stream) {
    return kernels::linear_compress(x.data_ptr(), w.data_ptr(), bias ? bias->data_ptr() : nullptr, out.data_ptr(), rows,
                                    columns, depth, codec, epilogue_of(activation), store, stream);
  });
  return std::tuple(out, lease);
}

template <class Launch>
void CudaArena::read(LeaseState& lease, const LeaseInfo& info, Launch launch) {
  const c10::cuda::CUDAGuard guard(device());
  const CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    poll();
    raise_failure();
  }
  launch(lease.slot->store(pages_.pool(), kPageShift, lease.record, info.columns), stream);
  if (stream == lease.home) return;
  const CaptureId capture = capture_of(stream).id;
  if (capture && capture != lease.capture) return;  // a graph that reads what isn't its own: no event can tell when
  std::lock_guard<std::mutex> lock(mutex_);
  auto reader = std::find_if(lease.readers.begin(), lease.readers.end(),
                             [&](const auto& r) { return r.stream == stream && r.capture == capture; });
  if (reader == lease.readers.end())
    reader = lease.readers.insert(reader, LeaseState::Reader{stream, capture, at::cuda::CUDAEvent()});
  reader->read.record(stream);
}

void CudaArena::restore(LeaseState& lease, const LeaseInfo& info, const at::Tensor& out, Activation activation) {
  const NvtxRange range("restore");
  read(lease, info, [&](const kernels::BlobStore& store, CUDAStream stream) {
    if (info.numel == 0) return;
    check(kernels::restore(out.data_ptr(), info.numel, dtype_of(info.dtype, "out"), info.codec, Keep::positive,
                           epilogue_of(activation), store, stream),
          "restore");
  });
}

void CudaArena::gradient(LeaseState& lease, const LeaseInfo& info, const at::Tensor& grad, Activation activation) {
  if (info.columns && !is_aligned(grad)) {  // kernels for patches have no other path
    const at::Tensor aligned = grad.clone();
    gradient(lease, info, aligned, activation);
    grad.copy_(aligned);
    return;
  }
  const NvtxRange range("gradient");
  read(lease, info, [&](const kernels::BlobStore& store, CUDAStream stream) {
    if (info.numel == 0) return;
    check(kernels::gradient(grad.data_ptr(), info.numel, dtype_of(info.dtype, "grad"), info.codec,
                            epilogue_of(activation), store, stream),
          "gradient");
  });
}

std::optional<at::Tensor> CudaArena::linear_gradient(LeaseState& lease, const LeaseInfo& info, const at::Tensor& grad,
                                                     const at::Tensor& w, Activation activation) {
  const std::int64_t rows = grad.size(0), depth = grad.size(1), columns = w.size(1);
  const cudaDeviceProp* const properties = at::cuda::getDeviceProperties(device().index());
  if (columns != info.columns || rows * columns != info.numel || !is_plain(grad, device()) || !is_plain(w, device()) ||
      !kernels::linear_gradient_pays(rows, columns, depth, properties->major, properties->minor))
    return std::nullopt;
  const NvtxRange range("linear_gradient");
  const at::Tensor out = at::empty({rows, columns}, grad.options());
  read(lease, info, [&](const kernels::BlobStore& store, CUDAStream stream) {
    check(kernels::linear_gradient(grad.data_ptr(), w.data_ptr(), out.data_ptr(), rows, columns, depth,
                                   epilogue_of(activation), store, stream),
          "linear_gradient");
  });
  return out;
}

void CudaArena::raise_failure() {
  if (failure_.empty()) return;
  const std::string what = std::exchange(failure_, {});
  throw OutOfArenaMemory(what);
}

MemoryStats CudaArena::memory_stats(bool synchronize) {
  MemoryStats stats;
  std::string warning;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (pages_.pool()) {
      const c10::cuda::CUDAGuard guard(device());
      poll();
      if (synchronize) {
        flush_all();
        check(cudaDeviceSynchronize(), "memory_stats(synchronize=True)");
        poll();
        raise_failure();
      }
    }
    stats.capacity = pages_.capacity_pages() * kPageBytes;
    stats.in_use = sizing_.known_pages() * kPageBytes;
    peak_pages_ = std::max(peak_pages_, sizing_.known_pages());
    stats.high_water = peak_pages_ * kPageBytes;
    stats.live_leases = sizing_.live();
    for (const auto& lease : leases_) {
      if (!lease->finished || lease->phase != LeaseState::Phase::live) continue;
      stats.spilled += std::int64_t{lease->record->spilled_pages} * kPageBytes;
      stats.dense_bytes += lease->dense_bytes;
      stats.payload_bytes += lease->units * kUnitBytes;
    }
    stats.payload_ratio =
        stats.dense_bytes ? static_cast<double>(stats.payload_bytes) / static_cast<double>(stats.dense_bytes) : 0;
    stats.waits = waits_;
    stats.growths = growths_;
    stats.failures = failures_;
    stats.leases_total = leases_total_;
    warning.swap(warning_);
  }
  give(warning);
  return stats;
}

void CudaArena::reset_peak_memory_stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!pages_.pool()) return;
  const c10::cuda::CUDAGuard guard(device());
  poll();
  flush_all();  // what warm slots hold is not in use
  check(kernels::reset_high_water(pages_.pool(), c10::cuda::getCurrentCUDAStream()), "resetting an arena's peak");
  peak_since_ = sizing_.last_id();
  peak_pages_ = sizing_.known_pages();
}

std::shared_ptr<Arena> make_arena(c10::Device device, const ArenaOptions& options) {
  TORCH_CHECK_VALUE(device.index() < c10::cuda::device_count(),
                    "bitsparse: expected a CUDA device below cuda:", static_cast<int>(c10::cuda::device_count()),
                    ", got ", device);
  return std::make_shared<CudaArena>(device, options);
}

c10::DeviceIndex current_device() { return c10::cuda::current_device(); }

}  // namespace bitsparse::cuda
