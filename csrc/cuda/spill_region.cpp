#include "cuda/spill_region.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <system_error>
#include <thread>

namespace bitsparse::cuda {

struct SpillRegion::Prepared {
  void* const data;
  const std::size_t bytes;
  const pid_t owner = getpid();
  std::atomic<bool> unwanted{false};
  std::promise<void> ready;

  explicit Prepared(std::size_t bytes)
      : data(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)), bytes(bytes) {}
  ~Prepared() {
    if (data != MAP_FAILED && getpid() == owner) munmap(data, bytes);  // a forked process has other things there
  }

  void map_pages() {
    constexpr std::size_t kSystemPage = 4096;
    auto* const first = static_cast<volatile char*>(data);
    for (std::size_t i = 0; i < bytes && !unwanted; i += kSystemPage) first[i] = 0;
    ready.set_value();
  }
};

SpillRegion::~SpillRegion() {
  if (prepared_) prepared_->unwanted = true;
  if (registered_) cudaHostUnregister(prepared_->data);
  if (allocated_) cudaFreeHost(allocated_);
}

void SpillRegion::prepare(std::int64_t bytes) {
  if (bytes <= 0) return;
  auto prepared = std::make_shared<Prepared>(static_cast<std::size_t>(bytes));
  if (prepared->data == MAP_FAILED) return;
  madvise(prepared->data, prepared->bytes, MADV_HUGEPAGE);  // fewer pages to map and to pin
  madvise(prepared->data, prepared->bytes, MADV_DONTFORK);  // the device's pages stay this process's
  try {
    // Detached, as nobody may wait for it where a process ends or has forked.
    std::thread([prepared] { prepared->map_pages(); }).detach();
    prepared_ = std::move(prepared);
  } catch (const std::system_error&) {
    // No thread: pin will do all of it.
  }
}

void* SpillRegion::pin(std::int64_t bytes) {
  if (prepared_ && prepared_->bytes == static_cast<std::size_t>(bytes)) {
    prepared_->ready.get_future().wait();
    void* address = nullptr;
    const unsigned flags = cudaHostRegisterMapped | cudaHostRegisterPortable;
    registered_ = cudaHostRegister(prepared_->data, prepared_->bytes, flags) == cudaSuccess;
    if (registered_ && cudaHostGetDevicePointer(&address, prepared_->data, 0) == cudaSuccess) return address;
    cudaGetLastError();
    if (registered_) cudaHostUnregister(prepared_->data);
    registered_ = false;
  }
  prepared_.reset();
  const auto size = static_cast<std::size_t>(bytes);
  if (cudaHostAlloc(&allocated_, size, cudaHostAllocMapped | cudaHostAllocPortable) == cudaSuccess) return allocated_;
  cudaGetLastError();
  allocated_ = nullptr;
  return nullptr;
}

}  // namespace bitsparse::cuda
