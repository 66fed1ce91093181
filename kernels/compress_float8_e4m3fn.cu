#include "device/compress_launch.cuh"

namespace bitsparse::kernels {

template cudaError_t compress_dtype<DType::float8_e4m3fn>(const void*, void*, std::int64_t, Codec, Keep, Epilogue,
                                                          const BlobStore&, cudaStream_t);

}  // namespace bitsparse::kernels
