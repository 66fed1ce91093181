#pragma once

// Ranges that profilers show on their timeline, in the NVTX domain "bitsparse". Without a profiler one costs a few
// nanoseconds; without the toolkit's NVTX headers there are none.

#if __has_include(<nvtx3/nvtx3.hpp>)
#include <nvtx3/nvtx3.hpp>

namespace bitsparse::cuda {

struct NvtxDomain {
  static constexpr const char* name = "bitsparse";
};
using NvtxRange = nvtx3::scoped_range_in<NvtxDomain>;

}  // namespace bitsparse::cuda
#else
namespace bitsparse::cuda {

struct NvtxRange {
  explicit NvtxRange(const char* /*name*/) {}
};

}  // namespace bitsparse::cuda
#endif
