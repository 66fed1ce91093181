// The kernels' path for tensors that do not start at a multiple of 16 bytes takes about four times the time of the
// other (docs/performance.md): where memory for a copy is there or cheap, copying first is faster.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"

namespace bitsparse::cuda {

inline bool is_chunk_aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % kChunkBytes == 0; }

}  // namespace bitsparse::cuda
