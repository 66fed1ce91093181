// The kernels' host interface: raw pointers, sizes and a stream in, an error code out. Nothing of torch.
//
// Every function enqueues work on `stream` and returns without waiting; nothing here checks what csrc has checked.
// Element pointers need the alignment of their element only (16-byte alignment is faster). Indices are 64-bit
// throughout.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "bitsparse/format.h"

namespace bitsparse::kernels {

// What happens to a value on its way through a kernel.
enum class Epilogue : std::uint8_t { none = 0, relu = 1, relu_squared = 2 };

// A bounded queue of free pages in device memory. Pop: take a permit from `available`, then a ticket from `head`; push:
// a ticket from `tail`, then return the permit. There are at least as many slots as pages, so a push never waits for
// long.
struct PageRing {
  std::uint64_t* slots;  // page addresses, 0 = not (yet) there
  std::uint32_t slot_mask;
  std::uint32_t available;
  std::uint32_t head;
  std::uint32_t tail;
};

// An arena's shared state in device memory.
struct PagePool {
  PageRing device_pages;
  PageRing spill_pages;  // pinned host memory that kernels reach directly
  std::uint32_t in_use;  // pages of both kinds
  std::uint32_t high_water;
  std::uint32_t page_shift;  // log2 of the units of a page
};

// What a lease's kernels tell the host, in host-mapped memory.
struct LeaseRecord {
  std::uint64_t units;          // payload, valid once `finished`
  std::uint32_t finished;       // every tile of the compress kernel has its place
  std::uint32_t released;       // pages are back in the pool, control and page table are zero again
  std::uint32_t lost_tiles;     // tiles that found the arena full
  std::uint32_t spilled_pages;  // pages taken from the spill region
  std::uint32_t high_water;     // the pool's, in pages, at the time of `finished`
  std::uint32_t reserved;
};

// A page table entry is the page's address; low bits are free as pages are aligned.
constexpr std::uint64_t kPageMissing = 0;
constexpr std::uint64_t kPageLost = 1;      // the pool was empty
constexpr std::uint64_t kPageSpilled = 2;   // flag: the page belongs to the spill region
constexpr std::uint64_t kPageOnDemand = 4;  // could not be taken in advance: the tile that needs it first takes it
constexpr std::uint64_t kPageFlagMask = 15;

// A lease's state in device memory, all zero before compress and after release.
struct LeaseControl {
  unsigned long long cursor;  // units reserved | tiles reserved << kCursorTileShift
  std::uint32_t irregular;    // some page is lost or of the spill region
  std::uint32_t reserved;
};
constexpr int kCursorTileShift = 40;

// Where the blobs of one compressed tensor are. Two kinds: a lease (pages of a pool) or one contiguous payload.
struct BlobStore {
  std::uint64_t* tiles;  // one entry a tile
  LeaseControl* control;
  std::uint64_t* pages;  // page table, zero before compress; null: the payload is contiguous at `payload`
  std::uint8_t* payload;
  PagePool* pool;
  LeaseRecord* record;  // device address of host-mapped memory; null: nobody asks
  std::uint32_t page_shift;
  std::uint32_t prefill;  // pages to take at once when compress starts; what turns out unneeded goes back when it ends
};

// Reads numel elements once, emits their compressed form, and (unless the epilogue is `none`) writes the activation to
// `out`, which may be `in` itself. relu and relu_squared need Keep::positive and a 2- or 4-byte dtype.
cudaError_t compress(const void* in, void* out, std::int64_t numel, DType dtype, Codec codec, Keep keep,
                     Epilogue epilogue, const BlobStore& store, cudaStream_t stream);

// Rebuilds the kept values, or their squares. `none` and `relu` restore the exact bits.
cudaError_t restore(void* out, std::int64_t numel, DType dtype, Codec codec, Keep keep, Epilogue epilogue,
                    const BlobStore& store, cudaStream_t stream);

// grad <- grad * d activation / d pre-activation, in place: the rounding is that of PyTorch's eager backward.
cudaError_t gradient(void* grad, std::int64_t numel, DType dtype, Codec codec, Epilogue activation,
                     const BlobStore& store, cudaStream_t stream);

// Copies blobs to `payload` in tile order, each to its entry in `ordered_tiles`.
cudaError_t gather_blobs(const BlobStore& from, const std::uint64_t* ordered_tiles, std::int64_t tiles, void* payload,
                         cudaStream_t stream);

// Ends a lease: pages back to the pool, control and page table zero, `record->released` set.
cudaError_t release(const BlobStore& store, cudaStream_t stream);

// An empty pool whose rings have the given slots (powers of two, zeroed here).
cudaError_t init_pool(PagePool* pool, std::uint64_t* device_slots, std::uint32_t device_slot_count,
                      std::uint64_t* spill_slots, std::uint32_t spill_slot_count, std::uint32_t page_shift,
                      cudaStream_t stream);

// The pool's high-water mark becomes what is in use now.
cudaError_t reset_high_water(PagePool* pool, cudaStream_t stream);

// Adds `count` consecutive pages; `flags` are or-ed into their addresses (kPageSpilled or 0).
cudaError_t push_pages(PagePool* pool, std::uint64_t first_page, std::uint32_t count, std::uint64_t flags,
                       cudaStream_t stream);

}  // namespace bitsparse::kernels
