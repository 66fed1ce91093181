// Kernels that keep an arena's pool of pages: set up, add pages, take a lease's pages back.
#include "device/blob_store.cuh"
#include "device/page_ring.cuh"
#include "launch.h"

namespace bitsparse::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kReleaseThreads = 1024;  // one thread block: most leases in one or two passes

__global__ void init_pool_kernel(PagePool* pool, std::uint64_t* device_slots, std::uint32_t device_slot_count,
                                 std::uint64_t* spill_slots, std::uint32_t spill_slot_count, std::uint32_t page_shift) {
  const std::uint32_t stride = gridDim.x * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (std::uint32_t i = thread; i < device_slot_count; i += stride) device_slots[i] = 0;
  for (std::uint32_t i = thread; i < spill_slot_count; i += stride) spill_slots[i] = 0;
  if (thread == 0) {
    pool->device_pages = {device_slots, device_slot_count - 1, 0, 0, 0};
    pool->spill_pages = {spill_slots, spill_slot_count - 1, 0, 0, 0};
    pool->in_use = 0;
    pool->high_water = 0;
    pool->page_shift = page_shift;
  }
}

__global__ void reset_high_water_kernel(PagePool* pool) { atomicExch(&pool->high_water, pool->in_use); }

// One thread block, so that permits are returned after all of its pages are in their slots.
__global__ void push_pages_kernel(PagePool* pool, std::uint64_t first_page, std::uint32_t count, std::uint64_t flags) {
  PageRing& ring = flags & kPageSpilled ? pool->spill_pages : pool->device_pages;
  const std::uint64_t page_bytes = static_cast<std::uint64_t>(kUnitBytes) << pool->page_shift;
  __shared__ std::uint32_t ticket;
  if (threadIdx.x == 0) ticket = atomicAdd(&ring.tail, count);
  __syncthreads();
  for (std::uint32_t i = threadIdx.x; i < count; i += blockDim.x)
    put_page(ring, ticket + i, (first_page + i * page_bytes) | flags);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&ring.available, count);
}

__global__ void __launch_bounds__(kReleaseThreads) release_kernel(BlobStore store) {
  return_pages(cooperative_groups::this_thread_block(), store, 0, pages_of(store.control->units, store.page_shift));
  if (threadIdx.x != 0) return;
  *store.control = LeaseControl{};
  if (store.record) set_record_flag(store, &LeaseRecord::released);
}

}  // namespace

cudaError_t init_pool(PagePool* pool, std::uint64_t* device_slots, std::uint32_t device_slot_count,
                      std::uint64_t* spill_slots, std::uint32_t spill_slot_count, std::uint32_t page_shift,
                      cudaStream_t stream) {
  init_pool_kernel<<<64, kThreads, 0, stream>>>(pool, device_slots, device_slot_count, spill_slots, spill_slot_count,
                                                page_shift);
  return cudaGetLastError();
}

cudaError_t reset_high_water(PagePool* pool, cudaStream_t stream) {
  reset_high_water_kernel<<<1, 1, 0, stream>>>(pool);
  return cudaGetLastError();
}

cudaError_t push_pages(PagePool* pool, std::uint64_t first_page, std::uint32_t count, std::uint64_t flags,
                       cudaStream_t stream) {
  push_pages_kernel<<<1, kThreads, 0, stream>>>(pool, first_page, count, flags);
  return cudaGetLastError();
}

cudaError_t release(const BlobStore& store, cudaStream_t stream) {
  release_kernel<<<1, kReleaseThreads, 0, stream>>>(store);
  return cudaGetLastError();
}

}  // namespace bitsparse::kernels
