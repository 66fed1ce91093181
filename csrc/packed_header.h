// The header of a packed tensor.
#pragma once

#include <algorithm>
#include <iterator>

#include "bitsparse/format.h"

namespace bitsparse {

inline PackedHeader make_packed_header(DType dtype, Codec codec, Keep keep, std::int64_t numel,
                                       std::int64_t payload_units, std::int64_t kept) {
  PackedHeader header{};
  std::copy(std::begin(kPackedMagic), std::end(kPackedMagic), header.magic);
  header.version = kFormatVersion;
  header.dtype = static_cast<std::uint8_t>(dtype);
  header.codec = static_cast<std::uint8_t>(codec);
  header.keep = static_cast<std::uint8_t>(keep);
  header.geometry = static_cast<std::uint8_t>(Geometry::linear);
  header.blocks_per_tile = static_cast<std::uint16_t>(blocks_per_tile(dtype));
  header.block_elements = static_cast<std::uint32_t>(block_elements(dtype));
  header.numel = static_cast<std::uint64_t>(numel);
  header.tiles = static_cast<std::uint64_t>(tile_count(dtype, numel));
  header.payload_bytes = static_cast<std::uint64_t>(payload_units) * kUnitBytes;
  header.kept = static_cast<std::uint64_t>(kept);
  return header;
}

}  // namespace bitsparse
