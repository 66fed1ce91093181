#include "device/restore_launch.cuh"

namespace bitsparse::kernels {

template cudaError_t restore_dtype<DType::float8_e4m3fn>(void*, std::int64_t, Codec, Keep, Epilogue, const BlobStore&,
                                                         cudaStream_t);
template cudaError_t gradient_dtype<DType::float8_e4m3fn>(void*, std::int64_t, Codec, Epilogue, const BlobStore&,
                                                          cudaStream_t);

}  // namespace bitsparse::kernels
