#include "cuda/packed.h"

#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/check.h"
#include "cuda/nvtx.h"
#include "launch.h"
#include "packed_header.h"

namespace bitsparse::cuda {

at::Tensor pack(const at::Tensor& t, DType dtype, Codec codec, Keep keep) {
  const NvtxRange range("pack");
  const c10::cuda::CUDAGuard guard(t.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const std::int64_t tiles = tile_count(dtype, t.numel());
  const auto bytes = t.options().dtype(at::kByte), words = t.options().dtype(at::kLong);

  at::Tensor entries = at::empty({tiles}, words), payload, offsets;
  std::int64_t payload_units = 0, kept = 0;
  if (tiles > 0) {
    const at::Tensor control = at::zeros({static_cast<std::int64_t>(sizeof(kernels::LeaseControl))}, bytes);
    payload = at::empty({max_payload_units(dtype, t.numel()) * kUnitBytes}, bytes);
    kernels::BlobStore store{};
    store.tiles = reinterpret_cast<std::uint64_t*>(entries.data_ptr<std::int64_t>());
    store.control = reinterpret_cast<kernels::LeaseControl*>(control.data_ptr());
    store.payload = payload.data_ptr<std::uint8_t>();
    check(
        kernels::compress(t.data_ptr(), nullptr, t.numel(), dtype, codec, keep, kernels::Epilogue::none, store, stream),
        "pack");
    // Blobs came in any order: give each its place in tile order.
    const at::Tensor sizes = entries.bitwise_right_shift(kEntryOffsetBits).bitwise_and((1 << kEntrySizeBits) - 1);
    const at::Tensor counts =
        entries.bitwise_right_shift(kEntryOffsetBits + kEntrySizeBits).bitwise_and((1 << kEntryCountBits) - 1);
    const at::Tensor ends = sizes.cumsum(0);
    offsets = ends.sub(sizes);
    const at::Tensor totals = at::stack({ends[-1], counts.sum()}).cpu();
    payload_units = totals[0].item<std::int64_t>();
    kept = totals[1].item<std::int64_t>();
  }

  const std::int64_t payload_at = packed_payload_offset(tiles);
  at::Tensor packed = at::empty({payload_at + payload_units * kUnitBytes}, bytes);
  packed.narrow(0, 0, payload_at).zero_();  // some of it is padding
  const PackedHeader header = make_packed_header(dtype, codec, keep, t.numel(), payload_units, kept);
  at::Tensor head = at::empty({sizeof(header)}, bytes.device(at::kCPU));
  std::memcpy(head.data_ptr(), &header, sizeof(header));
  packed.narrow(0, 0, sizeof(header)).copy_(head);
  if (tiles > 0) {
    kernels::BlobStore from{};
    from.tiles = reinterpret_cast<std::uint64_t*>(entries.data_ptr<std::int64_t>());
    from.payload = payload.data_ptr<std::uint8_t>();
    check(kernels::gather_blobs(from, reinterpret_cast<const std::uint64_t*>(offsets.data_ptr<std::int64_t>()), tiles,
                                packed.data_ptr<std::uint8_t>() + payload_at, stream),
          "pack");
    const std::int64_t offset_mask = (std::int64_t{1} << kEntryOffsetBits) - 1;
    const at::Tensor ordered = entries.bitwise_and(~offset_mask).bitwise_or(offsets);
    packed.narrow(0, sizeof(PackedHeader), 8 * tiles).copy_(ordered.view(at::kByte));
  }
  return packed;
}

void unpack(const at::Tensor& packed, const PackedHeader& header, const at::Tensor& out) {
  const NvtxRange range("unpack");
  if (header.numel == 0) return;
  const c10::cuda::CUDAGuard guard(packed.device());
  auto* base = packed.data_ptr<std::uint8_t>();
  kernels::BlobStore store{};
  store.tiles = reinterpret_cast<std::uint64_t*>(base + sizeof(PackedHeader));
  store.payload = base + packed_payload_offset(static_cast<std::int64_t>(header.tiles));
  check(kernels::restore(out.data_ptr(), static_cast<std::int64_t>(header.numel), static_cast<DType>(header.dtype),
                         static_cast<Codec>(header.codec), static_cast<Keep>(header.keep), kernels::Epilogue::none,
                         store, c10::cuda::getCurrentCUDAStream()),
        "unpack");
}

}  // namespace bitsparse::cuda
