// The bitsparse format: every constant and index rule that encoders and decoders share.
//
// One header for the CPU backend (C++17) and the CUDA kernels; docs/format.md explains it in prose with a worked
// example. A tensor is a flat run of elements cut into blocks of 1024, or 2048 of one byte (geometry `linear`). A block
// is encoded on its own: a mask that says which elements are kept, then the kept values as codes of one width.
// Consecutive blocks form a tile, and a tile's blob (block headers, then block bodies) is contiguous and 16-byte
// aligned. A tile table says where blobs are.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define BITSPARSE_HD __host__ __device__
#else
#define BITSPARSE_HD
#endif

namespace bitsparse {

// The numbers are stored in files: never renumber.
enum class DType : std::uint8_t { bfloat16 = 0, float16 = 1, float32 = 2, float8_e4m3fn = 3, float8_e5m2 = 4 };

// How a block's kept values become codes. Decoders need no codec, only the width and reference in the block header.
enum class Codec : std::uint8_t {
  raw = 0,       // all bits
  signless = 1,  // sign bit dropped in blocks where no kept value has it
  tight = 2,     // patterns relative to the block's smallest one, with the bits that the block's range needs
};

// Which elements are kept; all others restore as +0.
enum class Keep : std::uint8_t {
  positive = 0,  // > 0, or NaN of either sign: what relu lets through
  nonzero = 1,   // any bit set: signed values and -0.0 restore exactly
};

// Which elements a block holds and in which order.
enum class Geometry : std::uint8_t {
  linear = 0,  // consecutive ones
  patch = 1,   // of a matrix, 16 rows x 64 columns, by rows; a tile's blocks lie side by side. Not in packed tensors
};

enum class MaskKind : std::uint32_t {
  flat = 0,       // one bit an element
  two_level = 1,  // which mask nibbles are not zero, then those
  dense = 2,      // no mask: all elements have a code
  empty = 3,      // no mask, no codes
};

constexpr int kFormatVersion = 3;
constexpr int kLanes = 32;       // a block is laid out for 32 lanes
constexpr int kChunkBytes = 16;  // a lane owns the 16-byte chunks lane, lane + 32, lane + 64, ... of its block
constexpr int kUnitBytes = 16;   // blobs start at and are padded to multiples of this
constexpr std::uint32_t kNibbleBits = 4;
// `raw` masks are always flat: it is the codec that costs least to write and read.
constexpr BITSPARSE_HD bool may_be_two_level(Codec codec) { return codec != Codec::raw; }

constexpr BITSPARSE_HD int element_bytes(DType dtype) {
  return dtype == DType::float32 ? 4 : (dtype == DType::bfloat16 || dtype == DType::float16) ? 2 : 1;
}

// Everything about a block that depends on the element size.
template <int Bytes>
struct BlockLayout {
  static_assert(Bytes == 1 || Bytes == 2 || Bytes == 4, "elements have 1, 2 or 4 bytes");
  static constexpr int kBits = 8 * Bytes;
  static constexpr int kLaneElements = Bytes == 1 ? 64 : 32;
  static constexpr int kBlockElements = kLanes * kLaneElements;
  static constexpr int kChunkElements = kChunkBytes / Bytes;
  static constexpr int kChunksPerLane = kLaneElements / kChunkElements;
  static constexpr int kBlocksPerTile = 4;
  static constexpr int kTileElements = kBlocksPerTile * kBlockElements;
  static constexpr int kMinWidth = kBits / 2;  // below this a 32-bit word could hold codes of three lanes of a warp

  // Block header, one 32-bit word: offset | width - 1 | mask kind | reference, from bit 0 up.
  static constexpr int kOffsetBits = 13;  // start of the body, in 32-bit words from the blob's start
  static constexpr int kWidthBits = Bytes == 4 ? 5 : 4;
  static constexpr int kKindBits = 2;
  static constexpr int kReferenceBits = 32 - kOffsetBits - kWidthBits - kKindBits;
  static constexpr int kWidthShift = kOffsetBits;
  static constexpr int kKindShift = kWidthShift + kWidthBits;
  static constexpr int kReferenceShift = kKindShift + kKindBits;
  static constexpr int kReferenceDrop = kBits > kReferenceBits ? kBits - kReferenceBits : 0;  // low bits not stored

  // A mask has a bit for every element, and a lane one or two words of them. `flat`: word w of lane l is word w * 32 +
  // l.
  static constexpr int kLaneMaskWords = kLaneElements / 32;
  static constexpr int kFlatMaskWords = kLanes * kLaneMaskWords;
  // `two_level`: a presence bit for every nibble of a lane's mask words, by lanes, then the nibbles that are not zero,
  // in the same order, 8 to a word.
  static constexpr int kPresenceWords = kFlatMaskWords / static_cast<int>(kNibbleBits);
  static constexpr BITSPARSE_HD std::uint32_t two_level_words(std::uint32_t nibbles) {
    return kPresenceWords + (nibbles + 7) / 8;
  }

  static constexpr int kBlockWords = kBlockElements * Bytes / 4;  // a block stored dense with all bits
  // A full block never exceeds kBlockWords (it would be stored dense); the last, partial one always has a mask.
  static constexpr int kMaxBodyWords = kFlatMaskWords + kBlockWords;
  static constexpr int kMaxTileWords = kBlocksPerTile * (1 + kBlockWords) + kFlatMaskWords;
  static constexpr int kMaxTileUnits = (kMaxTileWords + 3) / 4;

  // Index in the block of the e-th element of a lane.
  static constexpr BITSPARSE_HD int element(int lane, int e) {
    return (lane + kLanes * (e / kChunkElements)) * kChunkElements + e % kChunkElements;
  }
  // Bit of the lane's mask, from bit 0 of its first word on, that stands for its e-th element. Two-byte elements come
  // in pairs, low halves in the low half of the word: one logic instruction per pair on a GPU.
  static constexpr BITSPARSE_HD int mask_bit(int e) { return Bytes == 2 ? (e >> 1) | ((e & 1) << 4) : e; }

  static constexpr BITSPARSE_HD std::uint32_t make_header(std::uint32_t offset_words, std::uint32_t width,
                                                          MaskKind kind, std::uint32_t stored_reference) {
    return offset_words | (width - 1) << kWidthShift | static_cast<std::uint32_t>(kind) << kKindShift |
           stored_reference << kReferenceShift;
  }
  static constexpr BITSPARSE_HD std::uint32_t header_offset(std::uint32_t h) { return h & ((1u << kOffsetBits) - 1); }
  static constexpr BITSPARSE_HD std::uint32_t header_width(std::uint32_t h) {
    return ((h >> kWidthShift) & ((1u << kWidthBits) - 1)) + 1;
  }
  static constexpr BITSPARSE_HD MaskKind header_kind(std::uint32_t h) {
    return static_cast<MaskKind>((h >> kKindShift) & ((1u << kKindBits) - 1));
  }
  // The reference as a bit pattern: what is added to a code to give the value's pattern.
  static constexpr BITSPARSE_HD std::uint32_t header_reference(std::uint32_t h) {
    return (h >> kReferenceShift) << kReferenceDrop;
  }
};

// Geometry `patch`, of two-byte elements.
struct Patch {
  static constexpr int kRows = 16;
  static constexpr int kColumns = BlockLayout<2>::kBlockElements / kRows;
  static constexpr int kTileColumns = BlockLayout<2>::kBlocksPerTile * kColumns;
  static constexpr int kRowChunks = kColumns / BlockLayout<2>::kChunkElements;
};

// With Keep::nonzero, `tight` orders patterns by magnitude first: the sign moves to bit 0 before the reference is
// taken.
constexpr BITSPARSE_HD bool rotates_sign(Codec codec, Keep keep) {
  return codec == Codec::tight && keep == Keep::nonzero;
}

// Tile table entry, 64 bits: where the blob is and how many elements it keeps.
constexpr int kEntryOffsetBits =
    36;  // in units, from the start of the payload (a lease: of its page-table address space)
constexpr int kEntrySizeBits = 12;                            // in units
constexpr int kEntryCountBits = 14;                           // kept elements
constexpr std::uint64_t kEntryLost = std::uint64_t{1} << 63;  // the arena had no room: restores as NaN

constexpr BITSPARSE_HD std::uint64_t make_entry(std::uint64_t offset_units, std::uint32_t size_units,
                                                std::uint32_t count) {
  return offset_units | static_cast<std::uint64_t>(size_units) << kEntryOffsetBits |
         static_cast<std::uint64_t>(count) << (kEntryOffsetBits + kEntrySizeBits);
}
constexpr BITSPARSE_HD std::uint64_t entry_offset(std::uint64_t entry) {
  return entry & ((std::uint64_t{1} << kEntryOffsetBits) - 1);
}
constexpr BITSPARSE_HD std::uint32_t entry_size(std::uint64_t entry) {
  return static_cast<std::uint32_t>(entry >> kEntryOffsetBits) & ((1u << kEntrySizeBits) - 1);
}
constexpr BITSPARSE_HD std::uint32_t entry_count(std::uint64_t entry) {
  return static_cast<std::uint32_t>(entry >> (kEntryOffsetBits + kEntrySizeBits)) & ((1u << kEntryCountBits) - 1);
}

// A self-contained compressed tensor: this header, the tile table, padding to 16 bytes, the payload. Little endian.
struct PackedHeader {
  std::uint8_t magic[4];
  std::uint16_t version;
  std::uint8_t dtype;
  std::uint8_t codec;
  std::uint8_t keep;
  std::uint8_t geometry;
  std::uint16_t blocks_per_tile;
  std::uint32_t block_elements;
  std::uint64_t numel;
  std::uint64_t tiles;
  std::uint64_t payload_bytes;
  std::uint64_t kept;  // elements kept, for the density
  std::uint64_t reserved[2];
};
static_assert(sizeof(PackedHeader) == 64, "the packed header is 64 bytes");
constexpr std::uint8_t kPackedMagic[4] = {'B', 'S', 'P', 'T'};

constexpr BITSPARSE_HD int blocks_per_tile(DType dtype) {
  return element_bytes(dtype) == 4   ? BlockLayout<4>::kBlocksPerTile
         : element_bytes(dtype) == 2 ? BlockLayout<2>::kBlocksPerTile
                                     : BlockLayout<1>::kBlocksPerTile;
}
constexpr BITSPARSE_HD int block_elements(DType dtype) {
  return element_bytes(dtype) == 4   ? BlockLayout<4>::kBlockElements
         : element_bytes(dtype) == 2 ? BlockLayout<2>::kBlockElements
                                     : BlockLayout<1>::kBlockElements;
}
constexpr BITSPARSE_HD std::int64_t tile_count(DType dtype, std::int64_t numel) {
  const std::int64_t elements = static_cast<std::int64_t>(blocks_per_tile(dtype)) * block_elements(dtype);
  return numel / elements + (numel % elements != 0);
}
// Most units that one tile's blob can have.
constexpr BITSPARSE_HD std::int64_t max_tile_units(DType dtype) {
  return element_bytes(dtype) == 4   ? BlockLayout<4>::kMaxTileUnits
         : element_bytes(dtype) == 2 ? BlockLayout<2>::kMaxTileUnits
                                     : BlockLayout<1>::kMaxTileUnits;
}
// Upper bound of a tensor's payload, whatever its data.
constexpr BITSPARSE_HD std::int64_t max_payload_units(DType dtype, std::int64_t numel) {
  return tile_count(dtype, numel) * max_tile_units(dtype);
}
constexpr BITSPARSE_HD std::int64_t packed_payload_offset(std::int64_t tiles) {
  return (static_cast<std::int64_t>(sizeof(PackedHeader)) + 8 * tiles + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
}

}  // namespace bitsparse
