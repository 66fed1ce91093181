// The launchers of launch.h that choose a dtype's instances.
#include "launch.h"

namespace bitsparse::kernels {

template <DType D>
cudaError_t compress_dtype(const void*, void*, std::int64_t, Codec, Keep, Epilogue, const BlobStore&, cudaStream_t);
template <DType D>
cudaError_t restore_dtype(void*, std::int64_t, Codec, Keep, Epilogue, const BlobStore&, cudaStream_t);
template <DType D>
cudaError_t gradient_dtype(void*, std::int64_t, Codec, Epilogue, const BlobStore&, cudaStream_t);

cudaError_t compress(const void* in, void* out, std::int64_t numel, DType dtype, Codec codec, Keep keep,
                     Epilogue epilogue, const BlobStore& store, cudaStream_t stream) {
  switch (dtype) {
    case DType::bfloat16: return compress_dtype<DType::bfloat16>(in, out, numel, codec, keep, epilogue, store, stream);
    case DType::float16: return compress_dtype<DType::float16>(in, out, numel, codec, keep, epilogue, store, stream);
    case DType::float32: return compress_dtype<DType::float32>(in, out, numel, codec, keep, epilogue, store, stream);
    case DType::float8_e4m3fn:
      return compress_dtype<DType::float8_e4m3fn>(in, out, numel, codec, keep, epilogue, store, stream);
    case DType::float8_e5m2:
      return compress_dtype<DType::float8_e5m2>(in, out, numel, codec, keep, epilogue, store, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t restore(void* out, std::int64_t numel, DType dtype, Codec codec, Keep keep, Epilogue epilogue,
                    const BlobStore& store, cudaStream_t stream) {
  switch (dtype) {
    case DType::bfloat16: return restore_dtype<DType::bfloat16>(out, numel, codec, keep, epilogue, store, stream);
    case DType::float16: return restore_dtype<DType::float16>(out, numel, codec, keep, epilogue, store, stream);
    case DType::float32: return restore_dtype<DType::float32>(out, numel, codec, keep, epilogue, store, stream);
    case DType::float8_e4m3fn:
      return restore_dtype<DType::float8_e4m3fn>(out, numel, codec, keep, epilogue, store, stream);
    case DType::float8_e5m2: return restore_dtype<DType::float8_e5m2>(out, numel, codec, keep, epilogue, store, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t gradient(void* grad, std::int64_t numel, DType dtype, Codec codec, Epilogue activation,
                     const BlobStore& store, cudaStream_t stream) {
  switch (dtype) {
    case DType::bfloat16: return gradient_dtype<DType::bfloat16>(grad, numel, codec, activation, store, stream);
    case DType::float16: return gradient_dtype<DType::float16>(grad, numel, codec, activation, store, stream);
    case DType::float32: return gradient_dtype<DType::float32>(grad, numel, codec, activation, store, stream);
    case DType::float8_e4m3fn:
      return gradient_dtype<DType::float8_e4m3fn>(grad, numel, codec, activation, store, stream);
    case DType::float8_e5m2: return gradient_dtype<DType::float8_e5m2>(grad, numel, codec, activation, store, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace bitsparse::kernels
