// The kernels' host interface: raw pointers, sizes and a stream in, an error code out. Nothing of torch.
//
// Every function enqueues work on `stream` and returns without waiting; nothing here checks what csrc has checked.
// Element pointers need the alignment of their element only (16-byte alignment is faster), in geometry `patch` that of
// 16 bytes. Indices are 64-bit throughout.
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
  std::uint32_t finished;       // every tile of the compress kernel has its range; its pages may still be coming
  std::uint32_t released;       // pages are back in the pool, control and page table are zero again
  std::uint32_t lost_tiles;     // tiles that found the arena full; changes whenever another one does
  std::uint32_t spilled_pages;  // pages that lie in the spill region now
  std::uint32_t high_water;     // the pool's, in pages, at the time of `finished` or `released`
  std::uint32_t has_spilled;    // a page has been in the spill region
};

// A page table entry is the page's address; bits that an address doesn't need tell more. An entry that the next launch
// must not take as it is, lost or spilled, carries the generation of the launch that wrote it.
constexpr int kGenerationShift = 60;  // 4 bits
constexpr std::uint64_t kPageMissing = 0;
constexpr std::uint64_t kPageLost = 1;     // the pool was empty
constexpr std::uint64_t kPageSpilled = 2;  // the page belongs to the spill region
constexpr std::uint64_t kPageFlagMask = std::uint64_t{15} << kGenerationShift | 15;

// What outlives a compress kernel beside the page table: the next one on the same memory starts from it, holding the
// pages. All zero where no lease has been, or the last one was released.
struct LeaseControl {
  unsigned long long cursor;    // units reserved | tiles reserved << kCursorTileShift | generation << kGenerationShift
  unsigned long long units;     // of the last finished launch: the page table has entries for as many and no others
  std::uint32_t lost_tiles;     // of all launches
  std::uint32_t spilled_pages;  // of those in the page table
};
constexpr int kCursorTileShift = 36;  // units: as many bits as a tile entry's offset; tiles: 24 bits

// A lease's tile table entry: where the blob is | size in units << kLeaseSizeShift | kEntryLost. A blob that lies in
// one page is named by its address, in units, so that readers need no page table; one that crosses into the next page,
// or was lost, by its offset in the lease, and a flag says so.
constexpr int kLeaseSizeShift = 45;  // addresses have 49 bits
constexpr std::uint64_t kLeaseByOffset = std::uint64_t{1} << 62;

// Where the blobs of one compressed tensor are. Two kinds: a lease (pages of a pool) or one contiguous payload.
struct BlobStore {
  std::uint64_t* tiles;  // one entry a tile
  LeaseControl* control;
  std::uint64_t* pages;  // page table, zero where the lease has no page; null: the payload is contiguous at `payload`
  std::uint8_t* payload;
  PagePool* pool;
  LeaseRecord* record;  // device address of host-mapped memory; null: nobody asks
  std::uint32_t page_shift;
  std::uint32_t columns;  // geometry `patch`: of the matrix; 0: geometry `linear`
};

// Reads numel elements once, emits their compressed form, and (unless the epilogue is `none`) writes the activation to
// `out`, which may be `in` itself. relu and relu_squared need Keep::positive. Pages that
// `store` still holds from an earlier compress are used again: work that reads them must come before on the stream.
cudaError_t compress(const void* in, void* out, std::int64_t numel, DType dtype, Codec codec, Keep keep,
                     Epilogue epilogue, const BlobStore& store, cudaStream_t stream);

// The same for h = x wᵀ + bias, which is not written: row-major bfloat16 matrices x (rows x depth), w (columns x depth)
// and out (rows x columns), bias null or of `columns` elements, all aligned to 16 bytes. Sums are float32, rounded
// once. Blocks are of geometry `patch`. Only where linear_compresses.
cudaError_t linear_compress(const void* x, const void* w, const void* bias, void* out, std::int64_t rows,
                            std::int64_t columns, std::int64_t depth, Codec codec, Epilogue activation,
                            const BlobStore& store, cudaStream_t stream);
// out <- (grad w) * d activation / d h, from a store that linear_compress filled: row-major bfloat16 matrices grad
// (rows x depth), w (depth x columns) and out (rows x columns), all aligned to 16 bytes; grad w is rounded as if it was
// written.
cudaError_t linear_gradient(const void* grad, const void* w, void* out, std::int64_t rows, std::int64_t columns,
                            std::int64_t depth, Epilogue activation, const BlobStore& store, cudaStream_t stream);
// For these sizes on a device of this compute capability?
bool linear_compresses(std::int64_t rows, std::int64_t columns, std::int64_t depth, int major, int minor);
// And is linear_gradient faster than a product and gradient()?
bool linear_gradient_pays(std::int64_t rows, std::int64_t columns, std::int64_t depth, int major, int minor);

// Rebuilds the kept values, or their squares. `none` and `relu` restore the exact bits.
cudaError_t restore(void* out, std::int64_t numel, DType dtype, Codec codec, Keep keep, Epilogue epilogue,
                    const BlobStore& store, cudaStream_t stream);

// grad <- grad * d activation / d pre-activation, in place: the rounding is that of PyTorch's eager backward. 8-bit
// floats, for which that has no operators: exact values rounded once, saturating at the largest finite one (relu² too).
cudaError_t gradient(void* grad, std::int64_t numel, DType dtype, Codec codec, Epilogue activation,
                     const BlobStore& store, cudaStream_t stream);

// Copies blobs to `payload` in tile order, each to its entry in `ordered_tiles`.
cudaError_t gather_blobs(const BlobStore& from, const std::uint64_t* ordered_tiles, std::int64_t tiles, void* payload,
                         cudaStream_t stream);

// Pages back to the pool, control and page table zero, `record->released` set.
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
