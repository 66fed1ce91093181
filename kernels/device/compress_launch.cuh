// Run-time choices to compress_kernel instances, for one dtype. Each dtype is a translation unit of its own.
#pragma once

#include "device/compress.cuh"
#include "device/launch_config.cuh"

namespace bitsparse::kernels {

template <DType D, Codec C, Keep K, Epilogue E>
cudaError_t compress_as(const void* in, void* out, std::int64_t numel, const BlobStore& store, cudaStream_t stream) {
  using Config = CompressConfig<D, C, K, E>;
  return launch<compress_kernel<Config>, Config>(tile_count(D, numel), stream, in, out, numel, store);
}

template <DType D, Codec C>
cudaError_t compress_codec(const void* in, void* out, std::int64_t numel, Keep keep, Epilogue epilogue,
                           const BlobStore& store, cudaStream_t stream) {
  if (keep == Keep::nonzero) return compress_as<D, C, Keep::nonzero, Epilogue::none>(in, out, numel, store, stream);
  if (epilogue == Epilogue::relu)
    return compress_as<D, C, Keep::positive, Epilogue::relu>(in, out, numel, store, stream);
  if (epilogue == Epilogue::relu_squared)
    return compress_as<D, C, Keep::positive, Epilogue::relu_squared>(in, out, numel, store, stream);
  return compress_as<D, C, Keep::positive, Epilogue::none>(in, out, numel, store, stream);
}

template <DType D>
cudaError_t compress_dtype(const void* in, void* out, std::int64_t numel, Codec codec, Keep keep, Epilogue epilogue,
                           const BlobStore& store, cudaStream_t stream) {
  if (codec == Codec::raw) return compress_codec<D, Codec::raw>(in, out, numel, keep, epilogue, store, stream);
  if (codec == Codec::signless)
    return compress_codec<D, Codec::signless>(in, out, numel, keep, epilogue, store, stream);
  return compress_codec<D, Codec::tight>(in, out, numel, keep, epilogue, store, stream);
}

}  // namespace bitsparse::kernels
