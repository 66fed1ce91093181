// Kernels that keep an arena's pool of pages: set up, add pages, end a lease.
#include <cub/block/block_scan.cuh>

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

// Puts the pages of this pass that satisfy `mine` into `ring`; returns how many.
__device__ std::uint32_t return_some(PageRing& ring, std::uint64_t page, bool mine) {
  using Scan = cub::BlockScan<std::uint32_t, kReleaseThreads>;
  __shared__ typename Scan::TempStorage scratch;
  __shared__ std::uint32_t ticket;
  std::uint32_t rank, count;
  Scan(scratch).ExclusiveSum(mine ? 1u : 0u, rank, count);
  if (threadIdx.x == 0 && count) ticket = atomicAdd(&ring.tail, count);
  __syncthreads();
  if (mine) put_page(ring, ticket + rank, page);
  __syncthreads();  // scratch and ticket may be used again
  return count;
}

__global__ void __launch_bounds__(kReleaseThreads) release_kernel(BlobStore store) {
  PagePool& pool = *store.pool;
  const std::uint64_t units = store.control->cursor & ((1ull << kCursorTileShift) - 1);
  const std::uint64_t pages = (units + (1ull << store.page_shift) - 1) >> store.page_shift;
  std::uint32_t device_count = 0, spill_count = 0;
  if (!store.control->irregular) {
    __shared__ std::uint32_t ticket;
    device_count = static_cast<std::uint32_t>(pages);
    if (threadIdx.x == 0) ticket = atomicAdd(&pool.device_pages.tail, device_count);
    __syncthreads();
    for (std::uint32_t i = threadIdx.x; i < device_count; i += kReleaseThreads) {
      put_page(pool.device_pages, ticket + i, store.pages[i]);
      store.pages[i] = kPageMissing;
    }
  } else {
    for (std::uint64_t base = 0; base < pages; base += kReleaseThreads) {
      const std::uint64_t i = base + threadIdx.x;
      std::uint64_t page = kPageMissing;
      if (i < pages) {
        page = store.pages[i];
        store.pages[i] = kPageMissing;
      }
      const bool real = page > kPageFlagMask, spilled = page & kPageSpilled;
      device_count += return_some(pool.device_pages, page, real && !spilled);
      spill_count += return_some(pool.spill_pages, page, real && spilled);
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *store.control = LeaseControl{};
    atomicSub(&pool.in_use, device_count + spill_count);
    if (device_count) atomicAdd(&pool.device_pages.available, device_count);
    if (spill_count) atomicAdd(&pool.spill_pages.available, spill_count);
    if (store.record) {
      volatile LeaseRecord* record = store.record;
      record->high_water = *reinterpret_cast<volatile std::uint32_t*>(&pool.high_water);
      __threadfence_system();
      record->released = 1;
    }
  }
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
