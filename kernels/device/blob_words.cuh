// Reading a blob where it lies.
#pragma once

#include <cstdint>

#include "device/blob_store.cuh"

namespace bitsparse::kernels {

// The words of a blob in one page or two; what is past its end reads as its last word.
class BlobWords {
 public:
  __device__ __forceinline__ BlobWords(const Placement& from, std::uint32_t units)
      : first_(reinterpret_cast<const std::uint32_t*>(from.first)),
        second_(reinterpret_cast<const std::uint32_t*>(from.second) - 4 * std::int64_t{from.first_units}),
        split_(4 * from.first_units),
        last_(4 * units - 1) {}
  __device__ __forceinline__ std::uint32_t operator[](std::uint32_t i) const {
    i = min(at_ + i, last_);
    return __ldg((i < split_ ? first_ : second_) + i);
  }
  __device__ __forceinline__ BlobWords operator+(std::uint32_t words) const {
    BlobWords moved = *this;
    moved.at_ += words;
    return moved;
  }
  __device__ __forceinline__ BlobWords& operator+=(std::uint32_t words) {
    at_ += words;
    return *this;
  }

 private:
  const std::uint32_t* first_;
  const std::uint32_t* second_;
  std::uint32_t split_, last_, at_ = 0;
};

}  // namespace bitsparse::kernels
