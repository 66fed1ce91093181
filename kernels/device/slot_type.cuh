// The unsigned integer of an element's size.
#pragma once

#include <cstdint>

namespace bitsparse::kernels {

template <int Bytes>
struct SlotType;
template <>
struct SlotType<1> {
  using type = std::uint8_t;
};
template <>
struct SlotType<2> {
  using type = std::uint16_t;
};
template <>
struct SlotType<4> {
  using type = std::uint32_t;
};
template <int Bytes>
using Slot = typename SlotType<Bytes>::type;

}  // namespace bitsparse::kernels
