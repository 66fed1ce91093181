#include "cpu/codec.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>

#include "cpu/huge_pages.h"
#include "cpu/tile_codec.h"
#include "packed_header.h"

#if !defined(_OPENMP)
#warning "compiled without OpenMP (-fopenmp): at::parallel_for will use one thread"
#endif

namespace bitsparse::cpu {
namespace {

// Tiles that a thread decodes at once, at least, and encodes at once: few enough to stay in its cache.
constexpr std::int64_t kGrainTiles = 16, kChunkTiles = 16;

struct Shape {
  std::int64_t numel;
  std::int64_t tiles;
  std::int64_t element_bytes;
  std::int64_t tile_elements;

  Shape(DType dtype, std::int64_t n)
      : numel(n),
        tiles(tile_count(dtype, n)),
        element_bytes(bitsparse::element_bytes(dtype)),
        tile_elements(static_cast<std::int64_t>(blocks_per_tile(dtype)) * block_elements(dtype)) {}

  std::uint32_t elements_of(std::int64_t tile) const {
    return static_cast<std::uint32_t>(std::min(tile_elements, numel - tile * tile_elements));
  }
  std::int64_t byte_offset(std::int64_t tile) const { return tile * tile_elements * element_bytes; }
};

// Threads encode chunks of tiles at the same time and learn in their order where each begins: after all before it. A
// thread waits only for chunks that others are working on, so data is read from memory once.
class Turns {
 public:
  // The chunk to encode next.
  std::int64_t next() { return next_.fetch_add(1, std::memory_order_relaxed); }

  // Waits until all chunks before `chunk` have done this; returns the units of those.
  std::int64_t take(std::int64_t chunk, std::int64_t units, std::int64_t kept) {
    for (int spins = 0; turn_.load(std::memory_order_acquire) != chunk; ++spins)
      if (spins >= kSpins) std::this_thread::yield();  // more threads than processors
    const std::int64_t before = units_;
    units_ += units;
    kept_ += kept;
    turn_.store(chunk + 1, std::memory_order_release);
    return before;
  }

  // Once all have.
  std::int64_t units() const { return units_; }
  std::int64_t kept() const { return kept_; }

 private:
  static constexpr int kSpins = 1000;
  std::atomic<std::int64_t> next_{0}, turn_{0};
  std::int64_t units_ = 0, kept_ = 0;  // of whose turn it is
};

// The start of a tensor that was allocated for the worst case. malloc maps the pages of anything this large, and those
// that nobody has touched cost nothing; of smaller memory the rest would be lost.
at::Tensor first_bytes(at::Tensor packed, std::int64_t bytes) {
  constexpr std::int64_t kAlwaysMapped = std::int64_t{32} << 20;
  if (packed.numel() <= kAlwaysMapped) return packed.narrow(0, 0, bytes).clone();
  packed.unsafeGetTensorImpl()->set_sizes_contiguous({bytes});
  packed.storage().unsafeGetStorageImpl()->set_nbytes(static_cast<std::size_t>(bytes));
  return packed;
}

}  // namespace

at::Tensor pack(const at::Tensor& contiguous, DType dtype, Codec codec, Keep keep) {
  TORCH_CHECK(contiguous.device().is_cpu() && contiguous.layout() == at::kStrided && contiguous.is_contiguous(),
              "bitsparse: pack expected a contiguous CPU tensor, got ", contiguous.toString(), " of sizes ",
              contiguous.sizes(), " and strides ", contiguous.strides());
  TORCH_CHECK(contiguous.element_size() == element_bytes(dtype), "bitsparse: pack expected elements of ",
              element_bytes(dtype), " bytes, got ", contiguous.scalar_type());
  const Shape shape(dtype, contiguous.numel());
  const EncodeRules rules = encode_rules(dtype, codec, keep);
  const TileCodec& tile_codec = cpu::tile_codec(static_cast<int>(shape.element_bytes), current_isa());
  const auto* in = static_cast<const std::uint8_t*>(contiguous.const_data_ptr());

  const std::int64_t payload = packed_payload_offset(shape.tiles);
  at::Tensor packed =
      at::empty({payload + max_payload_units(dtype, shape.numel) * kUnitBytes}, at::TensorOptions(at::kByte));
  auto* const out = packed.mutable_data_ptr<std::uint8_t>();
  advise_huge_pages(out, packed.numel());
  const std::unique_ptr<std::uint64_t[]> entries(new std::uint64_t[shape.tiles]);
  Turns turns;
  const std::int64_t chunks = (shape.tiles + kChunkTiles - 1) / kChunkTiles;
  at::parallel_for(0, std::min<std::int64_t>(chunks, at::get_num_threads()), 1, [&](std::int64_t, std::int64_t) {
    const std::int64_t chunk_bytes = kChunkTiles * max_tile_units(dtype) * kUnitBytes;
    const std::unique_ptr<std::uint8_t[]> encoded(new std::uint8_t[chunk_bytes + kBlobSlack]);
    for (std::int64_t chunk; (chunk = turns.next()) < chunks;) {
      const std::int64_t begin = chunk * kChunkTiles, end = std::min(begin + kChunkTiles, shape.tiles);
      std::int64_t units = 0, kept = 0;
      for (std::int64_t tile = begin; tile < end; ++tile) {
        std::uint32_t tile_kept = 0;
        const std::uint32_t tile_units = tile_codec.encode(in + shape.byte_offset(tile), shape.elements_of(tile), rules,
                                                           encoded.get() + units * kUnitBytes, &tile_kept);
        entries[tile] = make_entry(static_cast<std::uint64_t>(units), tile_units, tile_kept);
        units += tile_units;
        kept += tile_kept;
      }
      const auto first = static_cast<std::uint64_t>(turns.take(chunk, units, kept));
      for (std::int64_t tile = begin; tile < end; ++tile) entries[tile] += make_entry(first, 0, 0);
      std::memcpy(out + payload + static_cast<std::int64_t>(first) * kUnitBytes, encoded.get(),
                  static_cast<std::size_t>(units) * kUnitBytes);
    }
  });
  TORCH_CHECK(turns.units() < std::int64_t{1} << kEntryOffsetBits,
              "bitsparse: pack expected a payload of less than 2^40 bytes, got ", turns.units(), " units of 16 bytes");

  const std::int64_t table_bytes = 8 * shape.tiles;
  const PackedHeader header = make_packed_header(dtype, codec, keep, shape.numel, turns.units(), turns.kept());
  std::memcpy(out, &header, sizeof header);
  if (shape.tiles != 0) std::memcpy(out + sizeof header, entries.get(), table_bytes);
  std::memset(out + sizeof header + table_bytes, 0, payload - table_bytes - static_cast<std::int64_t>(sizeof header));
  return first_bytes(std::move(packed), payload + turns.units() * kUnitBytes);
}

namespace {

constexpr const char* kInvalid = "bitsparse: invalid packed tensor: ";

// Decodes all tiles to `out`, or only checks them when it is null.
void decode(const at::Tensor& packed, const PackedHeader& header, std::uint8_t* out) {
  const auto dtype = static_cast<DType>(header.dtype);
  const Shape shape(dtype, static_cast<std::int64_t>(header.numel));
  const auto codec = static_cast<Codec>(header.codec);
  const DecodeRules rules{rotates_sign(codec, static_cast<Keep>(header.keep)), may_be_two_level(codec)};
  const TileCodec& tile_codec = cpu::tile_codec(static_cast<int>(shape.element_bytes), current_isa());
  const auto* const data = packed.const_data_ptr<std::uint8_t>();
  const std::uint8_t* const payload = data + packed_payload_offset(shape.tiles);
  const auto payload_units = static_cast<std::int64_t>(header.payload_bytes / kUnitBytes);
  const auto entry_of = [&](std::int64_t tile) {
    std::uint64_t entry;
    std::memcpy(&entry, data + sizeof header + 8 * tile, sizeof entry);
    return entry;
  };
  const auto end_of = [&](std::int64_t tile) {
    const std::uint64_t entry = entry_of(tile);
    return static_cast<std::int64_t>(entry_offset(entry)) + static_cast<std::int64_t>(entry_size(entry));
  };

  std::atomic<std::uint64_t> total{0};
  at::parallel_for(0, shape.tiles, kGrainTiles, [&](std::int64_t begin, std::int64_t end) {
    std::unique_ptr<std::uint8_t[]> padded;
    std::uint64_t kept = 0;
    for (std::int64_t tile = begin; tile < end; ++tile) {
      const std::uint64_t entry = entry_of(tile);
      const auto offset = static_cast<std::int64_t>(entry_offset(entry));
      const std::int64_t expected = tile == 0 ? 0 : end_of(tile - 1);
      TORCH_CHECK(make_entry(entry_offset(entry), entry_size(entry), entry_count(entry)) == entry, kInvalid, "tile ",
                  tile, ": expected unused bits of its table entry to be 0, got entry ", entry);
      TORCH_CHECK(offset == expected, kInvalid, "tile ", tile, ": expected its blob to start at unit ", expected,
                  ", got ", offset);
      TORCH_CHECK(end_of(tile) <= payload_units, kInvalid, "tile ", tile, ": expected its blob to end within ",
                  payload_units, " units, got ", end_of(tile));

      const std::uint8_t* blob = payload + offset * kUnitBytes;
      const std::int64_t blob_bytes = std::int64_t{entry_size(entry)} * kUnitBytes;
      if ((payload_units - offset) * kUnitBytes - blob_bytes < static_cast<std::int64_t>(kBlobSlack)) {
        padded.reset(new std::uint8_t[blob_bytes + kBlobSlack]());
        std::memcpy(padded.get(), blob, blob_bytes);
        blob = padded.get();
      }
      const TileError error = tile_codec.decode(blob, entry_size(entry), entry_count(entry), shape.elements_of(tile),
                                                rules, out == nullptr ? nullptr : out + shape.byte_offset(tile));
      TORCH_CHECK(error.what == nullptr, kInvalid, "tile ", tile, ", block ", error.block, ": ", error.what,
                  ": expected ", error.expected, ", got ", error.got);
      kept += entry_count(entry);
    }
    total += kept;
  });

  const std::int64_t end = shape.tiles == 0 ? 0 : end_of(shape.tiles - 1);
  TORCH_CHECK(end == payload_units, kInvalid, "expected the tiles to end at the payload's end, unit ", payload_units,
              ", got unit ", end);
  TORCH_CHECK(total.load() == header.kept, kInvalid, "expected the header's count of kept elements to be the tiles' ",
              total.load(), ", got ", header.kept);
}

PackedHeader read_header(const at::Tensor& packed) {
  PackedHeader header;
  std::memcpy(&header, packed.const_data_ptr(), sizeof header);
  return header;
}

}  // namespace

void unpack(const at::Tensor& packed, void* out) {
  decode(packed, read_header(packed), static_cast<std::uint8_t*>(out));
}

PackedHeader validate(const at::Tensor& packed, bool deep) {
  TORCH_CHECK(packed.defined(), kInvalid, "expected a tensor, got an undefined one");
  TORCH_CHECK(packed.device().is_cpu() && packed.layout() == at::kStrided && packed.scalar_type() == at::kByte &&
                  packed.dim() == 1 && packed.is_contiguous(),
              kInvalid, "expected a contiguous one-dimensional uint8 CPU tensor, got ", packed.toString(), " of sizes ",
              packed.sizes());
  const std::int64_t size = packed.numel();
  TORCH_CHECK(size >= static_cast<std::int64_t>(sizeof(PackedHeader)), kInvalid, "expected at least ",
              sizeof(PackedHeader), " bytes, got ", size);
  const PackedHeader header = read_header(packed);
  TORCH_CHECK(std::memcmp(header.magic, kPackedMagic, sizeof header.magic) == 0, kInvalid,
              "expected it to start with the bytes 'BSPT', got ", int{header.magic[0]}, " ", int{header.magic[1]}, " ",
              int{header.magic[2]}, " ", int{header.magic[3]});
  TORCH_CHECK(header.version == kFormatVersion, kInvalid, "expected format version ", kFormatVersion, ", got ",
              header.version);
  TORCH_CHECK(header.dtype <= static_cast<int>(DType::float8_e5m2), kInvalid, "expected a dtype number of 0 to 4, got ",
              int{header.dtype});
  TORCH_CHECK(header.codec <= static_cast<int>(Codec::tight), kInvalid, "expected a codec number of 0 to 2, got ",
              int{header.codec});
  TORCH_CHECK(header.keep <= static_cast<int>(Keep::nonzero), kInvalid, "expected a keep number of 0 or 1, got ",
              int{header.keep});
  TORCH_CHECK(header.geometry == static_cast<int>(Geometry::linear), kInvalid, "expected geometry 0 (linear), got ",
              int{header.geometry});
  const auto dtype = static_cast<DType>(header.dtype);
  TORCH_CHECK(header.block_elements == static_cast<std::uint32_t>(block_elements(dtype)), kInvalid,
              "expected blocks of ", block_elements(dtype), " elements, got ", header.block_elements);
  TORCH_CHECK(header.blocks_per_tile == blocks_per_tile(dtype), kInvalid, "expected ", blocks_per_tile(dtype),
              " blocks a tile, got ", header.blocks_per_tile);
  const auto max_numel = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max() / element_bytes(dtype));
  TORCH_CHECK(header.numel <= max_numel, kInvalid, "expected at most ", max_numel, " elements, got ", header.numel);
  const std::int64_t tiles = tile_count(dtype, static_cast<std::int64_t>(header.numel));
  TORCH_CHECK(header.tiles == static_cast<std::uint64_t>(tiles), kInvalid, "expected ", tiles, " tiles for ",
              header.numel, " elements, got ", header.tiles);
  TORCH_CHECK(header.kept <= header.numel, kInvalid, "expected at most ", header.numel, " kept elements, got ",
              header.kept);
  TORCH_CHECK(header.reserved[0] == 0 && header.reserved[1] == 0, kInvalid,
              "expected reserved header fields to be 0, got ", header.reserved[0], " and ", header.reserved[1]);
  const std::int64_t payload = packed_payload_offset(tiles);
  TORCH_CHECK(size >= payload, kInvalid, "expected at least ", payload, " bytes for header and tile table, got ", size);
  TORCH_CHECK(header.payload_bytes % kUnitBytes == 0, kInvalid, "expected payload bytes in multiples of ", kUnitBytes,
              ", got ", header.payload_bytes);
  TORCH_CHECK(header.payload_bytes == static_cast<std::uint64_t>(size - payload), kInvalid, "expected ",
              header.payload_bytes, " payload bytes after the tile table, got ", size - payload);
  if (deep) decode(packed, header, nullptr);
  return header;
}

}  // namespace bitsparse::cpu
