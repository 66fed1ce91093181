// The kernels without an arena, for `python -m benchmarks arena` to compare with: a compressed tensor whose memory the
// caller has at hand, at its worst-case size. Not part of the public interface.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "cuda/check.h"
#include "cuda/epilogue.h"
#include "dtype.h"
#include "launch.h"
#include "names.h"

namespace bitsparse::cuda {
namespace {

constexpr std::int64_t kTilesOffset = 64;  // LeaseControl | tile table | payload

kernels::BlobStore contiguous_store(const at::Tensor& memory, DType dtype, std::int64_t numel) {
  const std::int64_t payload_at =
      (kTilesOffset + 8 * tile_count(dtype, numel) + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  const std::int64_t needed = payload_at + max_payload_units(dtype, numel) * kUnitBytes;
  TORCH_CHECK_VALUE(memory.is_contiguous() && memory.scalar_type() == at::kByte && memory.numel() >= needed,
                    "bitsparse::_contiguous: expected store to be ", needed, " bytes, at first zeros, got ",
                    memory.numel(), " of ", memory.scalar_type());
  auto* base = static_cast<std::uint8_t*>(memory.data_ptr());
  kernels::BlobStore store{};
  store.control = reinterpret_cast<kernels::LeaseControl*>(base);
  store.tiles = reinterpret_cast<std::uint64_t*>(base + kTilesOffset);
  store.payload = base + payload_at;
  return store;
}

// `t`: what compress reads and overwrites with its activation, what restore writes, or the gradient.
void contiguous(at::Tensor& t, at::Tensor& memory, std::string_view operation, std::string_view activation_name,
                std::string_view codec_name) {
  TORCH_CHECK_VALUE(t.is_contiguous() && t.device() == memory.device(),
                    "bitsparse::_contiguous: expected t to be contiguous and on store's device");
  const c10::cuda::CUDAGuard guard(t.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const DType dtype = dtype_of(t.scalar_type(), "t");
  const Codec codec = parse_codec(codec_name);
  const kernels::Epilogue epilogue = epilogue_of(parse_activation(activation_name));
  const kernels::BlobStore store = contiguous_store(memory, dtype, t.numel());
  void* const data = t.data_ptr();
  if (operation == "compress") {
    check(kernels::compress(data, data, t.numel(), dtype, codec, Keep::positive, epilogue, store, stream), "compress");
  } else if (operation == "restore") {
    check(kernels::restore(data, t.numel(), dtype, codec, Keep::positive, epilogue, store, stream), "restore");
  } else {
    TORCH_CHECK_VALUE(operation == "gradient",
                      "bitsparse::_contiguous: expected operation to be 'compress', 'restore' or 'gradient', got '",
                      operation, "'");
    check(kernels::gradient(data, t.numel(), dtype, codec, epilogue, store, stream), "gradient");
  }
}

}  // namespace
}  // namespace bitsparse::cuda

TORCH_LIBRARY_IMPL(bitsparse, CUDA, m) { m.impl("_contiguous", bitsparse::cuda::contiguous); }
