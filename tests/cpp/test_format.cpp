// The format's constants and index rules, against numbers written down here and not derived from the header.
#include <gtest/gtest.h>

#include <cstddef>
#include <set>

#include "bitsparse/format.h"
#include "reference_codec.h"

namespace bitsparse {
namespace {

TEST(Format, StoredNumbersNeverChange) {
  EXPECT_EQ(kFormatVersion, 3);
  EXPECT_EQ(static_cast<int>(DType::bfloat16), 0);
  EXPECT_EQ(static_cast<int>(DType::float16), 1);
  EXPECT_EQ(static_cast<int>(DType::float32), 2);
  EXPECT_EQ(static_cast<int>(DType::float8_e4m3fn), 3);
  EXPECT_EQ(static_cast<int>(DType::float8_e5m2), 4);
  EXPECT_EQ(static_cast<int>(Codec::raw), 0);
  EXPECT_EQ(static_cast<int>(Codec::signless), 1);
  EXPECT_EQ(static_cast<int>(Codec::tight), 2);
  EXPECT_EQ(static_cast<int>(Keep::positive), 0);
  EXPECT_EQ(static_cast<int>(Keep::nonzero), 1);
  EXPECT_EQ(static_cast<int>(Geometry::linear), 0);
  EXPECT_EQ(static_cast<int>(MaskKind::flat), 0);
  EXPECT_EQ(static_cast<int>(MaskKind::two_level), 1);
  EXPECT_EQ(static_cast<int>(MaskKind::dense), 2);
  EXPECT_EQ(static_cast<int>(MaskKind::empty), 3);
}

TEST(Format, PackedHeaderLayout) {
  EXPECT_EQ(offsetof(PackedHeader, magic), 0u);
  EXPECT_EQ(offsetof(PackedHeader, version), 4u);
  EXPECT_EQ(offsetof(PackedHeader, dtype), 6u);
  EXPECT_EQ(offsetof(PackedHeader, codec), 7u);
  EXPECT_EQ(offsetof(PackedHeader, keep), 8u);
  EXPECT_EQ(offsetof(PackedHeader, geometry), 9u);
  EXPECT_EQ(offsetof(PackedHeader, blocks_per_tile), 10u);
  EXPECT_EQ(offsetof(PackedHeader, block_elements), 12u);
  EXPECT_EQ(offsetof(PackedHeader, numel), 16u);
  EXPECT_EQ(offsetof(PackedHeader, tiles), 24u);
  EXPECT_EQ(offsetof(PackedHeader, payload_bytes), 32u);
  EXPECT_EQ(offsetof(PackedHeader, kept), 40u);
  EXPECT_EQ(offsetof(PackedHeader, reserved), 48u);
  EXPECT_EQ(sizeof(PackedHeader), 64u);
}

template <int Bytes>
void check_layout(int width_bits, int reference_bits, int lane_elements) {
  using L = BlockLayout<Bytes>;
  SCOPED_TRACE(Bytes);
  EXPECT_EQ(L::kOffsetBits, 13);
  EXPECT_EQ(L::kWidthBits, width_bits);
  EXPECT_EQ(L::kReferenceBits, reference_bits);
  EXPECT_EQ(L::kBlocksPerTile, 4);
  EXPECT_EQ(L::kLaneElements, lane_elements);
  EXPECT_EQ(L::kBlockElements, 32 * lane_elements);
  EXPECT_EQ(L::kFlatMaskWords, lane_elements);
  EXPECT_EQ(L::kPresenceWords, lane_elements / 4);
  EXPECT_EQ(static_cast<int>(L::two_level_words(0)), lane_elements / 4);
  EXPECT_EQ(static_cast<int>(L::two_level_words(9)), lane_elements / 4 + 2);
  EXPECT_EQ(L::kMinWidth, 4 * Bytes);

  std::set<int> positions;
  for (int lane = 0; lane < 32; ++lane) {
    std::set<int> bits;
    for (int e = 0; e < lane_elements; ++e) {
      EXPECT_EQ(L::element(lane, e), reference::position(lane, e, 8 * Bytes));
      EXPECT_EQ(L::mask_bit(e), reference::mask_bit(e, 8 * Bytes));
      positions.insert(L::element(lane, e));
      bits.insert(L::mask_bit(e));
    }
    EXPECT_EQ(static_cast<int>(bits.size()), lane_elements);
    EXPECT_EQ(*bits.begin(), 0);
    EXPECT_EQ(*bits.rbegin(), lane_elements - 1);
  }
  EXPECT_EQ(static_cast<int>(positions.size()), 32 * lane_elements);
  EXPECT_EQ(*positions.begin(), 0);
  EXPECT_EQ(*positions.rbegin(), 32 * lane_elements - 1);

  // Every field survives at its extremes, next to the others' extremes.
  const auto max_offset = static_cast<std::uint32_t>(L::kMaxTileWords);
  const std::uint32_t max_reference = (1u << reference_bits) - 1;
  ASSERT_LT(max_offset, 1u << 13);
  for (std::uint32_t offset : {0u, 1u, max_offset}) {
    for (std::uint32_t width = L::kMinWidth; width <= static_cast<std::uint32_t>(L::kBits); ++width) {
      for (std::uint32_t kind = 0; kind < 4; ++kind) {
        for (std::uint32_t stored : {0u, 1u, max_reference}) {
          const std::uint32_t h = L::make_header(offset, width, static_cast<MaskKind>(kind), stored);
          EXPECT_EQ(L::header_offset(h), offset);
          EXPECT_EQ(L::header_width(h), width);
          EXPECT_EQ(static_cast<std::uint32_t>(L::header_kind(h)), kind);
          EXPECT_EQ(L::header_reference(h), stored << L::kReferenceDrop);
        }
      }
    }
  }
  EXPECT_LT(L::kMaxTileUnits, 1 << kEntrySizeBits);
  EXPECT_LT(L::kTileElements, 1 << kEntryCountBits);
}

TEST(Format, BlockLayouts) {
  check_layout<1>(4, 13, 64);
  check_layout<2>(4, 13, 32);
  check_layout<4>(5, 12, 32);
}

TEST(Format, TileTableEntry) {
  const std::uint64_t offset = (std::uint64_t{1} << 36) - 1;
  const std::uint64_t entry = make_entry(offset, 4095, 16383);
  EXPECT_EQ(entry_offset(entry), offset);
  EXPECT_EQ(entry_size(entry), 4095u);
  EXPECT_EQ(entry_count(entry), 16383u);
  EXPECT_EQ(entry & kEntryLost, 0u);
  EXPECT_EQ(make_entry(1, 0, 0), 1u);
  EXPECT_EQ(make_entry(0, 1, 0), std::uint64_t{1} << 36);
  EXPECT_EQ(make_entry(0, 0, 1), std::uint64_t{1} << 48);
}

TEST(Format, TileCountsNearBoundariesAndPast32Bits) {
  EXPECT_EQ(tile_count(DType::bfloat16, 0), 0);
  EXPECT_EQ(tile_count(DType::bfloat16, 1), 1);
  EXPECT_EQ(tile_count(DType::bfloat16, 4096), 1);
  EXPECT_EQ(tile_count(DType::bfloat16, 4097), 2);
  EXPECT_EQ(tile_count(DType::float8_e5m2, 8192), 1);
  EXPECT_EQ(tile_count(DType::float8_e5m2, 8193), 2);
  EXPECT_EQ(tile_count(DType::float32, 4096), 1);
  EXPECT_EQ(tile_count(DType::float32, 4097), 2);
  EXPECT_EQ(tile_count(DType::float8_e5m2, (std::int64_t{1} << 33) + 1), (std::int64_t{1} << 20) + 1);
  EXPECT_EQ(tile_count(DType::float32, INT64_MAX), std::int64_t{1} << 51);
  EXPECT_EQ(packed_payload_offset(0), 64);
  EXPECT_EQ(packed_payload_offset(1), 80);
  EXPECT_EQ(packed_payload_offset(2), 80);
  EXPECT_EQ(packed_payload_offset(3), 96);
}

TEST(Format, NeverMoreThanOnePercentAboveDense) {
  for (DType dtype : {DType::bfloat16, DType::float16, DType::float32, DType::float8_e4m3fn, DType::float8_e5m2}) {
    const std::int64_t elements = std::int64_t{block_elements(dtype)} * blocks_per_tile(dtype);
    // What full tiles can take: the largest body of every block, the headers and the table entry.
    const std::int64_t full_tile = elements * element_bytes(dtype) + 4 * blocks_per_tile(dtype) + 8;
    EXPECT_LE(100 * full_tile, 101 * elements * element_bytes(dtype));
    EXPECT_GE(16 * max_tile_units(dtype), full_tile - 8);
  }
}

}  // namespace
}  // namespace bitsparse
