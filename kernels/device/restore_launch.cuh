// Run-time choices to restore_kernel instances, for one dtype. Each dtype is a translation unit of its own.
#pragma once

#include "device/launch_config.cuh"
#include "device/relu_gradient.cuh"
#include "device/restore.cuh"

namespace bitsparse::kernels {

// Decoders need no codec: `signless` codes are read by the `tight` kernel. `raw` has one of its own, as its codes are
// whole elements.
constexpr Codec decoder_of(Codec codec) { return codec == Codec::raw ? Codec::raw : Codec::tight; }

template <class Config>
cudaError_t restore_as(void* data, std::int64_t numel, const BlobStore& store, cudaStream_t stream) {
  return launch<restore_kernel<Config>, Config>(tile_count(Config::kDType, numel), stream, data, numel, store);
}

// Of geometry `patch`, which only bfloat16 has: an activation, or a gradient.
template <Codec C, Output O>
cudaError_t restore_patches(void* data, std::int64_t numel, Epilogue activation, const BlobStore& store,
                            cudaStream_t stream) {
  constexpr DType D = DType::bfloat16;
  constexpr Geometry G = Geometry::patch;
  if (activation == Epilogue::relu_squared)
    return restore_as<RestoreConfig<D, C, Keep::positive, Epilogue::relu_squared, O, G>>(data, numel, store, stream);
  constexpr Output kOutput = O == Output::activation ? Output::value : O;
  return restore_as<RestoreConfig<D, C, Keep::positive, Epilogue::relu, kOutput, G>>(data, numel, store, stream);
}

template <DType D, Codec C>
cudaError_t restore_codec(void* out, std::int64_t numel, bool rotated, Epilogue epilogue, const BlobStore& store,
                          cudaStream_t stream) {
  if constexpr (D == DType::bfloat16)
    if (store.columns) return restore_patches<C, Output::activation>(out, numel, epilogue, store, stream);
  if (epilogue == Epilogue::relu_squared)
    return restore_as<RestoreConfig<D, C, Keep::positive, Epilogue::relu_squared, Output::activation>>(out, numel,
                                                                                                       store, stream);
  if (rotated)
    return restore_as<RestoreConfig<D, C, Keep::nonzero, Epilogue::none, Output::value>>(out, numel, store, stream);
  return restore_as<RestoreConfig<D, C, Keep::positive, Epilogue::none, Output::value>>(out, numel, store, stream);
}

template <DType D>
cudaError_t restore_dtype(void* out, std::int64_t numel, Codec codec, Keep keep, Epilogue epilogue,
                          const BlobStore& store, cudaStream_t stream) {
  const bool rotated = rotates_sign(codec, keep);
  if (decoder_of(codec) == Codec::raw)
    return restore_codec<D, Codec::raw>(out, numel, rotated, epilogue, store, stream);
  return restore_codec<D, Codec::tight>(out, numel, rotated, epilogue, store, stream);
}

template <DType D, Codec C>
cudaError_t gradient_codec(void* grad, std::int64_t numel, Epilogue activation, const BlobStore& store,
                           cudaStream_t stream) {
  if constexpr (D == DType::bfloat16)
    if (store.columns) return restore_patches<C, Output::gradient>(grad, numel, activation, store, stream);
  return restore_as<RestoreConfig<D, C, Keep::positive, Epilogue::relu_squared, Output::gradient>>(grad, numel, store,
                                                                                                   stream);
}

template <DType D>
cudaError_t gradient_dtype(void* grad, std::int64_t numel, Codec codec, Epilogue activation, const BlobStore& store,
                           cudaStream_t stream) {
  if (activation == Epilogue::relu && !store.columns) {
    using Config = ReluGradientConfig<D>;
    return launch<relu_gradient_kernel<Config>, Config>(tile_count(D, numel), stream, grad, numel, store);
  }
  if (decoder_of(codec) == Codec::raw) return gradient_codec<D, Codec::raw>(grad, numel, activation, store, stream);
  return gradient_codec<D, Codec::tight>(grad, numel, activation, store, stream);
}

}  // namespace bitsparse::kernels
