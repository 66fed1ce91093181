// pack and unpack: checks, and the backends' codecs behind them.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "bitsparse/compressed_tensor.h"
#include "cpu/codec.h"
#include "cpu/huge_pages.h"
#include "dtype.h"
#include "names.h"
#include "typed_operator.h"
#ifdef BITSPARSE_WITH_CUDA
#include "cuda/packed.h"
#endif

namespace bitsparse {
namespace {

at::Tensor pack_op(const at::Tensor& t, std::string_view codec_name, std::string_view keep_name) {
  const Codec codec = parse_codec(codec_name);
  const Keep keep = parse_keep(keep_name);
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, "bitsparse::pack: expected t to be a strided tensor, got layout ",
                    t.layout());
  const DType dtype = dtype_of(t.scalar_type(), "t");
  const at::Tensor contiguous = t.contiguous();
#ifdef BITSPARSE_WITH_CUDA
  if (t.is_cuda()) return cuda::pack(contiguous, dtype, codec, keep);
#endif
  return cpu::pack(contiguous, dtype, codec, keep);
}

at::Tensor unpack_op(const at::Tensor& packed, at::IntArrayRef size, at::ScalarType dtype, bool validated) {
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, "bitsparse::unpack: expected packed to have dtype uint8, got ",
                   packed.scalar_type());
  TORCH_CHECK_VALUE(packed.dim() == 1 && packed.is_contiguous(),
                    "bitsparse::unpack: expected packed to be a contiguous vector, got shape ", packed.sizes());
  // Device data that nobody vouches for is checked on the host: a wrong header word would send a kernel out of bounds.
  const std::int64_t head_bytes = std::min<std::int64_t>(packed.numel(), sizeof(PackedHeader));
  PackedHeader header{};
  if (packed.is_cpu() || !validated) {
    header = cpu::validate(packed.cpu(), /*deep=*/!packed.is_cpu());
  } else {
    const at::Tensor head = packed.narrow(0, 0, head_bytes).cpu();
    std::memcpy(&header, head.data_ptr(), head_bytes);
  }
  TORCH_CHECK_TYPE(static_cast<DType>(header.dtype) == dtype_of(dtype, "dtype"),
                   "bitsparse::unpack: expected dtype to be ", scalar_type(static_cast<DType>(header.dtype)),
                   " as packed, got ", dtype);
  const std::int64_t numel = c10::multiply_integers(size);
  TORCH_CHECK_VALUE(numel == static_cast<std::int64_t>(header.numel), "bitsparse::unpack: expected size to have ",
                    header.numel, " elements as packed, got ", size);
  at::Tensor out = at::empty(size, packed.options().dtype(dtype));
#ifdef BITSPARSE_WITH_CUDA
  if (packed.is_cuda()) {
    // The tile table is read as 8-byte words and blobs in 16-byte units; only a view at an odd offset is less aligned
    // than that.
    const bool aligned = reinterpret_cast<std::uintptr_t>(packed.data_ptr()) % kUnitBytes == 0;
    cuda::unpack(aligned ? packed : packed.clone(), header, out);
    return out;
  }
#endif
  cpu::advise_huge_pages(out.data_ptr(), static_cast<std::int64_t>(out.nbytes()));
  cpu::unpack(packed, out.data_ptr());
  return out;
}

at::Tensor unpack_meta(const at::Tensor& packed, c10::SymIntArrayRef size, at::ScalarType dtype, bool) {
  return at::empty_symint(size, packed.options().dtype(dtype));
}

void register_backend(torch::Library& m) {
  m.impl("pack", pack_op);
  m.impl("unpack", unpack_op);
}

}  // namespace

TORCH_LIBRARY_IMPL(bitsparse, CPU, m) { register_backend(m); }
TORCH_LIBRARY_IMPL(bitsparse, CUDA, m) { register_backend(m); }
TORCH_LIBRARY_IMPL(bitsparse, Meta, m) { m.impl("unpack", unpack_meta); }

at::Tensor pack(const at::Tensor& t, std::string_view codec, std::string_view keep) {
  static const auto op =
      typed_operator<at::Tensor(const at::Tensor&, std::string_view, std::string_view)>("bitsparse::pack");
  return op.call(t, codec, keep);
}

at::Tensor unpack(const at::Tensor& packed, at::IntArrayRef size, at::ScalarType dtype, bool validated) {
  static const auto op =
      typed_operator<at::Tensor(const at::Tensor&, c10::SymIntArrayRef, at::ScalarType, bool)>("bitsparse::unpack");
  return op.call(packed, c10::fromIntArrayRefSlow(size), dtype, validated);
}

}  // namespace bitsparse
