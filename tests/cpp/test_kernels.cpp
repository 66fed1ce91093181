// The kernels by themselves: where blobs go, what is in them, and what happens to pages. Everything that they write
// lies between canaries.
#include <gtest/gtest.h>

#include "gpu.h"

class Kernels : public GpuTest {};

#ifndef BITSPARSE_WITH_CUDA
TEST_F(Kernels, All) {}
#else

#include <ATen/ops/full.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "launch.h"
#include "reference_codec.h"

namespace bitsparse {
namespace {

using kernels::BlobStore;
using kernels::Epilogue;
using reference::Bytes;

constexpr DType kDTypes[] = {DType::bfloat16, DType::float16, DType::float32, DType::float8_e4m3fn, DType::float8_e5m2};
constexpr Codec kCodecs[] = {Codec::raw, Codec::signless, Codec::tight};
constexpr Keep kKeeps[] = {Keep::positive, Keep::nonzero};
constexpr std::uint8_t kCanary = 0xa5;
constexpr cudaStream_t kStream = nullptr;

void run(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

// Device memory; at::full for its bytes and nothing else of torch.
class Buffer {
 public:
  // `offset`: bytes beyond 16-byte alignment.
  explicit Buffer(std::size_t size, std::uint8_t fill = kCanary, std::size_t offset = 0)
      : size_(size),
        memory_(at::full({static_cast<std::int64_t>(2 * kGuard + offset + size)}, kCanary,
                         at::TensorOptions(at::kByte).device(at::kCUDA))),
        data_(memory_.data_ptr<std::uint8_t>() + kGuard + offset) {
    if (fill != kCanary && size) run(cudaMemset(data_, fill, size));
  }
  explicit Buffer(const Bytes& bytes, std::size_t offset = 0) : Buffer(bytes.size(), kCanary, offset) {
    if (size_) run(cudaMemcpy(data_, bytes.data(), size_, cudaMemcpyHostToDevice));
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  void* get() const { return data_; }
  // Waits for the device.
  Bytes read() const {
    Bytes all(memory_.nbytes());
    run(cudaMemcpy(all.data(), memory_.data_ptr(), all.size(), cudaMemcpyDeviceToHost));
    const auto begin = all.begin() + (data_ - memory_.data_ptr<std::uint8_t>()),
               end = begin + static_cast<std::ptrdiff_t>(size_);
    const auto intact = [](std::uint8_t byte) { return byte == kCanary; };
    EXPECT_TRUE(std::all_of(all.begin(), begin, intact)) << "written before the buffer";
    EXPECT_TRUE(std::all_of(end, all.end(), intact)) << "written after the buffer";
    return Bytes(begin, end);
  }
  template <class T>
  std::vector<T> read_as() const {
    const Bytes bytes = read();
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }

 private:
  static constexpr std::size_t kGuard = 512;
  std::size_t size_;
  at::Tensor memory_;
  std::uint8_t* data_;
};

std::uint32_t smallest_page_shift(DType dtype) {
  std::uint32_t shift = 0;
  while ((std::int64_t{1} << shift) < max_tile_units(dtype)) ++shift;
  return shift;
}

// Pages with canaries between them, so that blobs which end in the wrong place show.
class Pool {
 public:
  Pool(std::uint32_t shift, std::uint32_t pages, std::uint32_t spill_pages = 0)
      : shift_(shift),
        pages_(pages),
        page_bytes_(std::size_t{kUnitBytes} << shift),
        memory_((page_bytes_ + kGap) * (pages + spill_pages)),
        pool_(sizeof(kernels::PagePool), 0),
        slots_(8 * kSlots),
        spill_slots_(8 * kSlots) {
    run(kernels::init_pool(pool(), slots_.as<std::uint64_t>(), kSlots, spill_slots_.as<std::uint64_t>(), kSlots, shift,
                           kStream));
    for (std::uint32_t i = 0; i < pages + spill_pages; ++i)
      run(kernels::push_pages(pool(), address(i), 1, i < pages ? 0 : kernels::kPageSpilled, kStream));
  }
  kernels::PagePool* pool() const { return pool_.as<kernels::PagePool>(); }
  std::uint32_t shift() const { return shift_; }
  kernels::PagePool state() const { return pool_.read_as<kernels::PagePool>()[0]; }

  // The lease's address space from its page table; pages that are not there are left out as canaries. Checks what lies
  // between pages, and pages that the table doesn't name.
  Bytes lease_space(const std::vector<std::uint64_t>& table) const {
    const Bytes all = memory_.read();
    std::vector<bool> touched(all.size() / (page_bytes_ + kGap), false);
    Bytes space;
    for (std::uint64_t entry : table) {
      if (entry == kernels::kPageMissing) break;
      if (entry & kernels::kPageLost) {
        space.insert(space.end(), page_bytes_, kCanary);
        continue;
      }
      const std::size_t offset = static_cast<std::size_t>((entry & ~kernels::kPageFlagMask) - address(0));
      const std::size_t index = offset / (page_bytes_ + kGap);
      EXPECT_EQ(offset % (page_bytes_ + kGap), 0u) << "not a page";
      EXPECT_LT(index, touched.size());
      if (index >= touched.size()) break;
      EXPECT_FALSE(touched[index]) << "a page twice in a table";
      EXPECT_EQ((entry & kernels::kPageSpilled) != 0, index >= pages_);
      touched[index] = true;
      space.insert(space.end(), all.begin() + static_cast<std::ptrdiff_t>(offset),
                   all.begin() + static_cast<std::ptrdiff_t>(offset + page_bytes_));
    }
    const auto intact = [&](std::size_t begin, std::size_t size) {
      return std::all_of(all.begin() + static_cast<std::ptrdiff_t>(begin),
                         all.begin() + static_cast<std::ptrdiff_t>(begin + size),
                         [](std::uint8_t byte) { return byte == kCanary; });
    };
    for (std::size_t i = 0; i < touched.size(); ++i) {
      const std::size_t page = i * (page_bytes_ + kGap);
      EXPECT_TRUE(intact(page + page_bytes_, kGap)) << "written after page " << i;
      if (!touched[i] && fresh_) {
        EXPECT_TRUE(intact(page, page_bytes_)) << "written to page " << i << ", which nobody took";
      }
    }
    return space;
  }
  void no_longer_fresh() { fresh_ = false; }

  // Every page is in its ring, once.
  void check_complete() const {
    const kernels::PagePool now = state();
    EXPECT_EQ(now.in_use, 0u);
    const auto total = static_cast<std::uint32_t>(memory_.read().size() / (page_bytes_ + kGap));
    check_ring(now.device_pages, slots_, 0, pages_, 0);
    check_ring(now.spill_pages, spill_slots_, pages_, total, kernels::kPageSpilled);
  }

 private:
  static constexpr std::uint32_t kSlots = 128;
  static constexpr std::size_t kGap = 256;

  std::uint64_t address(std::uint32_t i) const {
    return reinterpret_cast<std::uint64_t>(memory_.get()) + i * (page_bytes_ + kGap);
  }
  void check_ring(const kernels::PageRing& ring, const Buffer& slots, std::uint32_t begin, std::uint32_t end,
                  std::uint64_t flags) const {
    EXPECT_EQ(ring.available, end - begin);
    EXPECT_EQ(ring.tail - ring.head, end - begin);
    std::set<std::uint64_t> expected, found;
    for (std::uint32_t i = begin; i < end; ++i) expected.insert(address(i) | flags);
    const auto content = slots.read_as<std::uint64_t>();
    for (std::uint64_t page : content) {
      if (page != 0) {
        EXPECT_TRUE(found.insert(page).second) << "a page twice";
      }
    }
    EXPECT_EQ(found, expected);
    for (std::uint32_t i = 0; i < end - begin; ++i) EXPECT_NE(content[(ring.head + i) & ring.slot_mask], 0u);
  }

  std::uint32_t shift_, pages_;
  std::size_t page_bytes_;
  Buffer memory_, pool_, slots_, spill_slots_;
  bool fresh_ = true;
};

// What a lease needs beside its pages.
struct Lease {
  Lease(std::int64_t tiles, std::int64_t table_pages)
      : tiles(8 * static_cast<std::size_t>(tiles)),
        control(sizeof(kernels::LeaseControl), 0),
        pages(8 * static_cast<std::size_t>(table_pages), 0),
        record(sizeof(kernels::LeaseRecord), 0) {}
  BlobStore store(const Pool& pool) const {
    return {tiles.as<std::uint64_t>(),
            control.as<kernels::LeaseControl>(),
            pages.as<std::uint64_t>(),
            nullptr,
            pool.pool(),
            record.as<kernels::LeaseRecord>(),
            pool.shift(),
            0};
  }
  kernels::LeaseRecord state() const { return record.read_as<kernels::LeaseRecord>()[0]; }
  void clear_record() { record = Buffer(sizeof(kernels::LeaseRecord), 0); }
  // Like entries of a packed tensor: offsets in the lease's address space, and no kept elements, which a lease doesn't
  // note. `count`: of the first tiles.
  std::vector<std::uint64_t> entries(const Pool& pool, std::size_t count = SIZE_MAX) const {
    const auto table = pages.read_as<std::uint64_t>();
    auto stored = tiles.read_as<std::uint64_t>();
    stored.resize(std::min(count, stored.size()));
    std::vector<std::uint64_t> result;
    for (std::uint64_t entry : stored) {
      const std::uint64_t at = entry & ((std::uint64_t{1} << kernels::kLeaseSizeShift) - 1);
      const auto size = static_cast<std::uint32_t>(entry >> kernels::kLeaseSizeShift) & ((1u << kEntrySizeBits) - 1);
      std::uint64_t offset = at;
      if (!(entry & kernels::kLeaseByOffset)) {
        const std::uint64_t address = at * kUnitBytes, page_bytes = std::uint64_t{kUnitBytes} << pool.shift();
        const auto page = std::find_if(table.begin(), table.end(), [&](std::uint64_t p) {
          const std::uint64_t begin = p & ~kernels::kPageFlagMask;
          return p != kernels::kPageMissing && !(p & kernels::kPageLost) && begin <= address &&
                 address + size * std::uint64_t{kUnitBytes} <= begin + page_bytes;
        });
        EXPECT_NE(page, table.end()) << "an address outside of the lease's pages";
        if (page == table.end()) continue;
        offset = (static_cast<std::uint64_t>(page - table.begin()) << pool.shift()) +
                 (address - (*page & ~kernels::kPageFlagMask)) / kUnitBytes;
      }
      result.push_back(make_entry(offset, size, 0) | (entry & kEntryLost));
    }
    return result;
  }

  Buffer tiles, control, pages, record;
};

struct Expected {
  std::vector<std::uint64_t> entries;
  Bytes payload;
  std::int64_t units() const { return static_cast<std::int64_t>(payload.size()) / kUnitBytes; }
  std::int64_t pages(std::uint32_t shift) const { return (units() + (std::int64_t{1} << shift) - 1) >> shift; }
};

Expected expected_of(const Bytes& data, DType dtype, Codec codec, Keep keep) {
  const Bytes packed = reference::pack(data, dtype, codec, keep);
  PackedHeader header;
  std::memcpy(&header, packed.data(), sizeof(header));
  Expected e;
  e.entries.resize(header.tiles);
  if (!e.entries.empty()) std::memcpy(e.entries.data(), packed.data() + sizeof(header), 8 * header.tiles);
  e.payload.assign(packed.end() - static_cast<std::ptrdiff_t>(header.payload_bytes), packed.end());
  return e;
}

// The blobs are the canonical ones, one after another in some order. Returns the number of lost ones.
std::int64_t check_blobs(const std::vector<std::uint64_t>& entries, const Bytes& space, const Expected& expected,
                         bool of_lease = true) {
  EXPECT_EQ(entries.size(), expected.entries.size());
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  std::int64_t lost = 0;
  for (std::size_t tile = 0; tile < entries.size(); ++tile) {
    const std::uint64_t entry = entries[tile], should = expected.entries[tile];
    EXPECT_EQ(entry_size(entry), entry_size(should)) << "tile " << tile;
    if (!of_lease) {
      EXPECT_EQ(entry_count(entry), entry_count(should)) << "tile " << tile;
    }
    ranges.emplace_back(entry_offset(entry), entry_size(entry));
    if (entry & kEntryLost) {
      ++lost;
      continue;
    }
    const std::size_t at = entry_offset(entry) * kUnitBytes, size = std::size_t{entry_size(entry)} * kUnitBytes;
    if (at + size > space.size()) {
      ADD_FAILURE() << "tile " << tile << " lies beyond the store";
      continue;
    }
    EXPECT_EQ(std::memcmp(space.data() + at, expected.payload.data() + entry_offset(should) * kUnitBytes, size), 0)
        << "tile " << tile << " is not the canonical blob";
  }
  std::sort(ranges.begin(), ranges.end());
  std::uint64_t end = 0;
  for (const auto& [offset, size] : ranges) {
    EXPECT_EQ(offset, end) << "a gap or an overlap";
    end = offset + size;
  }
  EXPECT_EQ(static_cast<std::int64_t>(end), expected.units());
  return lost;
}

// Nothing is behind the last blob.
void check_rest(const Bytes& space, const Expected& expected) {
  if (space.size() < expected.payload.size()) return;
  EXPECT_TRUE(std::all_of(space.begin() + static_cast<std::ptrdiff_t>(expected.payload.size()), space.end(),
                          [](std::uint8_t byte) { return byte == kCanary; }))
      << "written behind the last blob";
}

// Tiles of every density; few values of few binades, with any pattern at all among them.
Bytes random_data(std::int64_t n, DType dtype, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  const reference::Rules r = reference::rules_of(dtype);
  const std::uint32_t one = ((1u << (r.exponent_bits - 1)) - 1) << r.mantissa_bits, sign = 1u << (r.bits - 1);
  const double densities[] = {0.0, 0.01, 0.06, 0.2, 0.5, 0.9, 1.0};
  Bytes out;
  double density = 0.2;
  for (std::int64_t i = 0; i < n; ++i) {
    if (i % 3000 == 0) density = densities[rng() % 7];
    const auto bits = static_cast<std::uint32_t>(rng());
    std::uint32_t pattern = 0;
    if (static_cast<double>(rng() % 10000) < density * 10000)
      pattern = bits % 2000 == 0 ? static_cast<std::uint32_t>(rng()) & (sign | (sign - 1))
                                 : one - bits % (2u << r.mantissa_bits);
    else
      pattern = bits % 3 == 0 ? 0 : bits % 3 == 1 ? sign : sign | (one + bits % 5);
    for (int b = 0; b < r.bits / 8; ++b) out.push_back(static_cast<std::uint8_t>(pattern >> (8 * b)));
  }
  return out;
}

std::int64_t tile_bytes(DType dtype) {
  return std::int64_t{blocks_per_tile(dtype)} * block_elements(dtype) * element_bytes(dtype);
}

// Lost tiles are NaN, all others exact.
void check_restored(const Bytes& got, const Bytes& expected, const std::vector<std::uint64_t>& entries, DType dtype) {
  ASSERT_EQ(got.size(), expected.size());
  const reference::Rules r = reference::rules_of(dtype);
  const std::uint32_t nan = (1u << (r.bits - 1)) - 1;
  for (std::size_t tile = 0; tile < entries.size(); ++tile) {
    const std::size_t begin = tile * static_cast<std::size_t>(tile_bytes(dtype));
    const std::size_t end = std::min(begin + static_cast<std::size_t>(tile_bytes(dtype)), got.size());
    if (entries[tile] & kEntryLost) {
      for (std::size_t i = begin / (r.bits / 8); i < end / (r.bits / 8); ++i)
        ASSERT_EQ(reference::element(got, r.bits, i), nan) << "element " << i << " of a lost tile";
    } else {
      ASSERT_EQ(std::memcmp(got.data() + begin, expected.data() + begin, end - begin), 0) << "tile " << tile;
    }
  }
}

Bytes restore(const BlobStore& store, std::int64_t numel, DType dtype, Codec codec, Keep keep, std::size_t offset = 0) {
  const Buffer out(static_cast<std::size_t>(numel * element_bytes(dtype)), kCanary, offset);
  run(kernels::restore(out.get(), numel, dtype, codec, keep, Epilogue::none, store, kStream));
  return out.read();
}

template <class Check>
void for_every_format(Check check) {
  for (DType dtype : kDTypes)
    for (Codec codec : kCodecs)
      for (Keep keep : kKeeps) {
        SCOPED_TRACE(::testing::Message() << "dtype " << static_cast<int>(dtype) << " codec " << static_cast<int>(codec)
                                          << " keep " << static_cast<int>(keep));
        check(dtype, codec, keep);
      }
}

TEST_F(Kernels, BlobsInOnePayloadAreCanonical) {
  for_every_format([](DType dtype, Codec codec, Keep keep) {
    for (std::int64_t n : {1, 1023, 4096, 8193, 40007}) {
      SCOPED_TRACE(n);
      const Bytes data = random_data(n, dtype, static_cast<std::uint64_t>(n));
      const Expected expected = expected_of(data, dtype, codec, keep);
      const Buffer in(data), tiles(8 * expected.entries.size()), control(sizeof(kernels::LeaseControl), 0),
          payload(static_cast<std::size_t>(max_payload_units(dtype, n) * kUnitBytes));
      BlobStore store{};
      store.tiles = tiles.as<std::uint64_t>();
      store.control = control.as<kernels::LeaseControl>();
      store.payload = payload.as<std::uint8_t>();
      run(kernels::compress(in.get(), nullptr, n, dtype, codec, keep, Epilogue::none, store, kStream));
      const auto entries = tiles.read_as<std::uint64_t>();
      const Bytes space = payload.read();
      EXPECT_EQ(check_blobs(entries, space, expected, /*of_lease=*/false), 0);
      check_rest(space, expected);
      control.read();
      EXPECT_TRUE(in.read() == data) << "the input has changed";
      check_restored(restore(store, n, dtype, codec, keep), reference::restored(data, dtype, keep), entries, dtype);

      const Buffer ordered(8 * expected.entries.size()), gathered(expected.payload.size());
      run(cudaMemcpy(ordered.get(), expected.entries.data(), 8 * expected.entries.size(), cudaMemcpyHostToDevice));
      run(kernels::gather_blobs(store, ordered.as<std::uint64_t>(), static_cast<std::int64_t>(entries.size()),
                                gathered.get(), kStream));
      EXPECT_TRUE(gathered.read() == expected.payload) << "gathered in tile order";
    }
  });
}

TEST_F(Kernels, BlobsInPagesAreCanonical) {
  int crossing = 0;
  for_every_format([&](DType dtype, Codec codec, Keep keep) {
    const std::int64_t n = 30 * tile_bytes(dtype) / element_bytes(dtype) + 1234;
    const Bytes data = random_data(n, dtype, 11), restored = reference::restored(data, dtype, keep);
    const Expected expected = expected_of(data, dtype, codec, keep);
    const Buffer in(data);
    Pool pool(smallest_page_shift(dtype), static_cast<std::uint32_t>(expected.pages(smallest_page_shift(dtype)) + 3));
    const auto used = static_cast<std::uint32_t>(expected.pages(pool.shift()));
    for (int round = 0; round < 3; ++round) {
      const Lease lease(tile_count(dtype, n), used + 4);
      const BlobStore store = lease.store(pool);
      run(kernels::compress(in.get(), nullptr, n, dtype, codec, keep, Epilogue::none, store, kStream));
      const auto entries = lease.entries(pool), table = lease.pages.read_as<std::uint64_t>();
      const Bytes space = pool.lease_space(table);
      EXPECT_EQ(check_blobs(entries, space, expected), 0);
      if (round == 0) check_rest(space, expected);
      pool.no_longer_fresh();
      for (std::uint64_t entry : entries)
        crossing +=
            entry_offset(entry) >> pool.shift() != (entry_offset(entry) + entry_size(entry) - 1) >> pool.shift();
      for (std::size_t i = 0; i < table.size(); ++i)
        EXPECT_EQ(table[i] != kernels::kPageMissing, i < used) << "page " << i;

      const kernels::LeaseRecord record = lease.state();
      EXPECT_EQ(record.finished, 1u);
      EXPECT_EQ(static_cast<std::int64_t>(record.units), expected.units());
      EXPECT_EQ(record.lost_tiles, 0u);
      EXPECT_EQ(record.spilled_pages, 0u);
      EXPECT_EQ(record.released, 0u);
      const kernels::PagePool now = pool.state();
      EXPECT_EQ(now.in_use, used);
      EXPECT_EQ(now.high_water, used);
      EXPECT_EQ(now.device_pages.available, 3u);

      for (int twice = 0; twice < 2; ++twice)
        check_restored(restore(store, n, dtype, codec, keep), restored, entries, dtype);
      run(kernels::release(store, kStream));
      EXPECT_EQ(lease.state().released, 1u);
      EXPECT_EQ(lease.state().high_water, used);
      const auto control = lease.control.read_as<kernels::LeaseControl>()[0];
      EXPECT_EQ(control.units, 0u);
      EXPECT_EQ(control.cursor << 4, 0u) << "only the generation may remain";
      for (std::uint64_t entry : lease.pages.read_as<std::uint64_t>()) EXPECT_EQ(entry, kernels::kPageMissing);
      pool.check_complete();
    }
  });
  EXPECT_GT(crossing, 100) << "blobs that lie across two pages";
}

// A lease's memory without a release in between: pages stay, are returned and are taken as sizes change.
TEST_F(Kernels, PagesKeptForTheNextLease) {
  const DType dtype = DType::bfloat16;
  constexpr std::int64_t kTiles = 90;
  constexpr std::uint32_t kPages = 100;  // one holds at least a tile
  const std::uint32_t shift = smallest_page_shift(dtype);
  Pool pool(shift, kPages);
  Lease lease(kTiles, kPages);
  const BlobStore store = lease.store(pool);
  std::set<std::uint32_t> sizes;
  for (std::uint64_t seed = 100; seed < 120; ++seed) {
    SCOPED_TRACE(seed);
    const std::int64_t n = (static_cast<std::int64_t>(seed) * 37 % (kTiles - 1) + 1) * tile_bytes(dtype) / 2 - 77;
    const Bytes data = random_data(n, dtype, seed), restored = reference::restored(data, dtype, Keep::positive);
    const Expected expected = expected_of(data, dtype, Codec::tight, Keep::positive);
    const Buffer in(data);
    const auto used = static_cast<std::uint32_t>(expected.pages(shift));
    sizes.insert(used);
    const auto before = lease.pages.read_as<std::uint64_t>();
    lease.clear_record();
    run(kernels::compress(in.get(), nullptr, n, dtype, Codec::tight, Keep::positive, Epilogue::none, lease.store(pool),
                          kStream));
    const auto table = lease.pages.read_as<std::uint64_t>();
    const Bytes space = pool.lease_space(table);
    auto entries = lease.entries(pool, expected.entries.size());
    EXPECT_EQ(check_blobs(entries, space, expected), 0);
    pool.no_longer_fresh();
    for (std::size_t i = 0; i < table.size(); ++i) {
      EXPECT_EQ(table[i] != kernels::kPageMissing, i < used) << "page " << i;
      if (i < used && before[i] != kernels::kPageMissing) {
        EXPECT_EQ(table[i], before[i]) << "page " << i << " was there before";
      }
    }
    const kernels::PagePool now = pool.state();
    EXPECT_EQ(now.in_use, used);
    EXPECT_EQ(now.device_pages.available, kPages - used);
    EXPECT_EQ(lease.state().finished, 1u);
    EXPECT_EQ(lease.state().lost_tiles, 0u);
    check_restored(restore(store, n, dtype, Codec::tight, Keep::positive), restored, entries, dtype);
  }
  EXPECT_GT(sizes.size(), 4u) << "sizes must differ for this test to mean anything";
  run(kernels::release(store, kStream));
  pool.check_complete();
}

// Lost pages are asked for again, and spilled ones replaced, by the next lease on the same memory.
TEST_F(Kernels, LostAndSpilledPagesAreNotKept) {
  const DType dtype = DType::bfloat16;
  const std::int64_t n = 100 * tile_bytes(dtype) / 2 + 77;
  const Bytes data = random_data(n, dtype, 21), restored = reference::restored(data, dtype, Keep::positive);
  const Expected expected = expected_of(data, dtype, Codec::tight, Keep::positive);
  const Buffer in(data);
  const std::uint32_t shift = smallest_page_shift(dtype);
  const auto used = static_cast<std::uint32_t>(expected.pages(shift));
  ASSERT_GT(used, 8u);
  for (std::uint32_t spill : {0u, 3u, used}) {
    SCOPED_TRACE(spill);
    Pool pool(shift, 2 * used, spill);
    Lease other(tile_count(dtype, n), used + 8), lease(tile_count(dtype, n), used + 8);
    const auto compress = [&](Lease& to) {
      to.clear_record();
      run(kernels::compress(in.get(), nullptr, n, dtype, Codec::tight, Keep::positive, Epilogue::none, to.store(pool),
                            kStream));
    };
    Lease third(tile_count(dtype, n), used + 8);
    compress(other);
    compress(third);  // now no device page is left
    pool.no_longer_fresh();
    std::int64_t all_lost = 0;
    for (int round = 0; round < 20; ++round) {  // more than there are generations
      compress(lease);
      const auto entries = lease.entries(pool);
      const std::int64_t lost = check_blobs(entries, pool.lease_space(lease.pages.read_as<std::uint64_t>()), expected);
      EXPECT_EQ(lost > 0, spill < used);
      all_lost += lost;
      EXPECT_EQ(lease.state().lost_tiles, static_cast<std::uint32_t>(all_lost));
      EXPECT_EQ(lease.state().spilled_pages, spill);
      EXPECT_EQ(lease.state().has_spilled, spill > 0);
      check_restored(restore(lease.store(pool), n, dtype, Codec::tight, Keep::positive), restored, entries, dtype);
    }
    run(kernels::release(third.store(pool), kStream));
    compress(lease);
    const auto entries = lease.entries(pool);
    EXPECT_EQ(check_blobs(entries, pool.lease_space(lease.pages.read_as<std::uint64_t>()), expected), 0);
    EXPECT_EQ(lease.state().lost_tiles, 0u);
    EXPECT_EQ(lease.state().spilled_pages, 0u);
    EXPECT_EQ(lease.state().has_spilled, 0u);
    EXPECT_EQ(pool.state().spill_pages.available, spill);
    check_restored(restore(lease.store(pool), n, dtype, Codec::tight, Keep::positive), restored, entries, dtype);
    run(kernels::release(lease.store(pool), kStream));
    run(kernels::release(other.store(pool), kStream));
    pool.check_complete();
  }
}

TEST_F(Kernels, ExhaustedPoolLosesTilesAndNothingElse) {
  for (DType dtype : {DType::bfloat16, DType::float32, DType::float8_e5m2}) {
    const std::int64_t n = 40 * tile_bytes(dtype) / element_bytes(dtype) + 77;
    const Bytes data = random_data(n, dtype, 13), restored = reference::restored(data, dtype, Keep::positive);
    const Expected expected = expected_of(data, dtype, Codec::tight, Keep::positive);
    const Buffer in(data);
    const std::uint32_t shift = smallest_page_shift(dtype);
    const auto used = static_cast<std::uint32_t>(expected.pages(shift));
    for (std::uint32_t pages : {0u, 1u, used / 2, used - 1}) {
      {
        SCOPED_TRACE(::testing::Message()
                     << "dtype " << static_cast<int>(dtype) << ": " << pages << " of " << used << " pages");
        const Pool pool(shift, pages);
        const Lease lease(tile_count(dtype, n), used + 8);
        const BlobStore store = lease.store(pool);
        run(kernels::compress(in.get(), nullptr, n, dtype, Codec::tight, Keep::positive, Epilogue::none, store,
                              kStream));
        const auto entries = lease.entries(pool);
        const std::int64_t lost =
            check_blobs(entries, pool.lease_space(lease.pages.read_as<std::uint64_t>()), expected);
        EXPECT_GT(lost, 0);
        if (pages == 0) {
          EXPECT_EQ(lost, tile_count(dtype, n));
        }
        const kernels::LeaseRecord record = lease.state();
        EXPECT_EQ(record.lost_tiles, static_cast<std::uint32_t>(lost));
        EXPECT_EQ(record.finished, 1u);
        EXPECT_EQ(static_cast<std::int64_t>(record.units), expected.units());
        EXPECT_EQ(pool.state().in_use, pages);
        EXPECT_EQ(pool.state().device_pages.available, 0u);

        check_restored(restore(store, n, dtype, Codec::tight, Keep::positive), restored, entries, dtype);
        const Buffer grad(random_data(n, dtype, 14));
        run(kernels::gradient(grad.get(), n, dtype, Codec::tight, Epilogue::relu, store, kStream));
        Bytes should = random_data(n, dtype, 14);
        const auto size = static_cast<std::size_t>(element_bytes(dtype));
        const Bytes zero(size, 0);
        for (std::size_t i = 0; i < should.size(); i += size)
          if (std::memcmp(restored.data() + i, zero.data(), size) == 0) std::memset(should.data() + i, 0, size);
        check_restored(grad.read(), should, entries, dtype);
        run(kernels::release(store, kStream));
        EXPECT_EQ(lease.state().released, 1u);
        for (std::uint64_t entry : lease.pages.read_as<std::uint64_t>()) EXPECT_EQ(entry, kernels::kPageMissing);
        pool.check_complete();
      }
    }
  }
}

TEST_F(Kernels, SpillPagesFollowDevicePages) {
  const DType dtype = DType::float16;
  const std::int64_t n = 40 * tile_bytes(dtype) / 2 + 77;
  const Bytes data = random_data(n, dtype, 15), restored = reference::restored(data, dtype, Keep::positive);
  const Expected expected = expected_of(data, dtype, Codec::tight, Keep::positive);
  const Buffer in(data);
  const std::uint32_t shift = smallest_page_shift(dtype);
  const auto used = static_cast<std::uint32_t>(expected.pages(shift));
  for (std::uint32_t pages : {0u, 1u, used - 1}) {
    {
      SCOPED_TRACE(::testing::Message() << pages << " of " << used << " pages");
      const Pool pool(shift, pages, used);
      const Lease lease(tile_count(dtype, n), used + 8);
      const BlobStore store = lease.store(pool);
      run(kernels::compress(in.get(), nullptr, n, dtype, Codec::tight, Keep::positive, Epilogue::none, store, kStream));
      const auto entries = lease.entries(pool);
      EXPECT_EQ(check_blobs(entries, pool.lease_space(lease.pages.read_as<std::uint64_t>()), expected), 0);
      EXPECT_EQ(lease.state().spilled_pages, used - pages);
      EXPECT_EQ(lease.state().lost_tiles, 0u);
      EXPECT_EQ(pool.state().in_use, used);
      EXPECT_EQ(pool.state().spill_pages.available, pages);
      check_restored(restore(store, n, dtype, Codec::tight, Keep::positive), restored, entries, dtype);
      run(kernels::release(store, kStream));
      pool.check_complete();
    }
  }
}

// The activation and the blobs are the same wherever input and output lie, and if they are one.
TEST_F(Kernels, PointersOfAnyAlignmentAndInPlace) {
  for (DType dtype : kDTypes) {
    const auto size = static_cast<std::size_t>(element_bytes(dtype));
    for (std::int64_t n : {1, 4096, 20000}) {
      const Bytes data = random_data(n, dtype, 16), relu = reference::restored(data, dtype, Keep::positive);
      const Expected expected = expected_of(data, dtype, Codec::tight, Keep::positive);
      const std::vector<std::pair<std::size_t, std::size_t>> offsets = {{0, 0}, {1, 0}, {0, 3}, {1, 1}, {5, 2}};
      Bytes squares;
      for (Epilogue epilogue : {Epilogue::relu, Epilogue::relu_squared}) {
        for (const auto& [in_offset, out_offset] : offsets) {
          for (bool in_place : {false, true}) {
            SCOPED_TRACE(::testing::Message() << "dtype " << static_cast<int>(dtype) << " n " << n << " offsets "
                                              << in_offset << " " << out_offset << " in place " << in_place);
            const Buffer in(data, in_offset * size), out(data.size(), kCanary, out_offset * size);
            const Buffer& to = in_place ? in : out;
            const Pool pool(smallest_page_shift(dtype),
                            static_cast<std::uint32_t>(expected.pages(smallest_page_shift(dtype))));
            const Lease lease(tile_count(dtype, n), 64);
            const BlobStore store = lease.store(pool);
            run(kernels::compress(in.get(), to.get(), n, dtype, Codec::tight, Keep::positive, epilogue, store,
                                  kStream));
            const auto entries = lease.entries(pool);
            EXPECT_EQ(check_blobs(entries, pool.lease_space(lease.pages.read_as<std::uint64_t>()), expected), 0);
            const Bytes written = to.read();
            if (!in_place) {
              EXPECT_TRUE(in.read() == data) << "the input has changed";
            }
            if (epilogue == Epilogue::relu) {
              EXPECT_TRUE(written == relu);
            } else {
              if (squares.empty()) squares = written;
              EXPECT_TRUE(written == squares) << "squares depend on where they are";
              const Buffer again(data.size(), kCanary, out_offset * size);
              run(kernels::restore(again.get(), n, dtype, Codec::tight, Keep::positive, epilogue, store, kStream));
              EXPECT_TRUE(again.read() == written) << "squares of backward are not those of forward";
            }
            check_restored(restore(store, n, dtype, Codec::tight, Keep::positive, in_offset * size), relu, entries,
                           dtype);
          }
        }
      }
    }
  }
}

// Around the number of kept elements from which on a block needs no mask, with the narrowest codes.
TEST_F(Kernels, NearlyDenseBlocks) {
  for (DType dtype : kDTypes) {
    const int block = block_elements(dtype), least = block - block / (4 * element_bytes(dtype));
    Bytes data;
    for (int kept = least - 20; kept < least + 20; ++kept) {
      for (int i = 0; i < block; ++i) {
        data.push_back(i * 7 % block < kept ? static_cast<std::uint8_t>(1 + i % 15) : 0);
        data.resize(data.size() + static_cast<std::size_t>(element_bytes(dtype)) - 1);
      }
    }
    const std::int64_t n = static_cast<std::int64_t>(data.size()) / element_bytes(dtype);
    for (Codec codec : kCodecs) {
      SCOPED_TRACE(::testing::Message() << "dtype " << static_cast<int>(dtype) << " codec " << static_cast<int>(codec));
      const Expected expected = expected_of(data, dtype, codec, Keep::positive);
      const Buffer in(data);
      const std::uint32_t shift = smallest_page_shift(dtype);
      const Pool pool(shift, static_cast<std::uint32_t>(expected.pages(shift)));
      const Lease lease(tile_count(dtype, n), 64);
      const BlobStore store = lease.store(pool);
      run(kernels::compress(in.get(), nullptr, n, dtype, codec, Keep::positive, Epilogue::none, store, kStream));
      const auto entries = lease.entries(pool);
      EXPECT_EQ(check_blobs(entries, pool.lease_space(lease.pages.read_as<std::uint64_t>()), expected), 0);
      check_restored(restore(store, n, dtype, codec, Keep::positive), data, entries, dtype);
    }
  }
}

// Element pointers of 8-bit types can have any address at all.
TEST_F(Kernels, BytesAtAnyAddress) {
  for (DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2}) {
    const Bytes data = random_data(20001, dtype, 17);
    for (Codec codec : kCodecs) {
      const Expected expected = expected_of(data, dtype, codec, Keep::nonzero);
      for (std::size_t offset : {1, 2, 7, 15}) {
        const Buffer in(data, offset);
        const Pool pool(smallest_page_shift(dtype),
                        static_cast<std::uint32_t>(expected.pages(smallest_page_shift(dtype))));
        const Lease lease(tile_count(dtype, 20001), 64);
        const BlobStore store = lease.store(pool);
        run(kernels::compress(in.get(), nullptr, 20001, dtype, codec, Keep::nonzero, Epilogue::none, store, kStream));
        const auto entries = lease.entries(pool);
        EXPECT_EQ(check_blobs(entries, pool.lease_space(lease.pages.read_as<std::uint64_t>()), expected), 0);
        check_restored(restore(store, 20001, dtype, codec, Keep::nonzero, 16 - offset), data, entries, dtype);
      }
    }
  }
}

// More pages than a thread block has threads, in a ring without a slot to spare. They are never touched.
TEST_F(Kernels, ManyConsecutivePages) {
  constexpr std::uint32_t kPages = 1024;
  const Buffer pool_memory(sizeof(kernels::PagePool), 0), slots(8 * kPages), spill_slots(8 * 64);
  auto* pool = pool_memory.as<kernels::PagePool>();
  run(kernels::init_pool(pool, slots.as<std::uint64_t>(), kPages, spill_slots.as<std::uint64_t>(), 64, 13, kStream));
  const std::uint64_t first = 1 << 20, page_bytes = kUnitBytes << 13;
  run(kernels::push_pages(pool, first, 1000, 0, kStream));
  run(kernels::push_pages(pool, first + 1000 * page_bytes, 24, 0, kStream));
  run(kernels::push_pages(pool, first + 5000 * page_bytes, 64, kernels::kPageSpilled, kStream));
  const auto state = pool_memory.read_as<kernels::PagePool>()[0];
  EXPECT_EQ(state.device_pages.available, kPages);
  EXPECT_EQ(state.spill_pages.available, 64u);
  EXPECT_EQ(state.page_shift, 13u);
  EXPECT_EQ(state.in_use, 0u);
  const auto pages = slots.read_as<std::uint64_t>();
  for (std::uint32_t i = 0; i < kPages; ++i) EXPECT_EQ(pages[i], first + i * page_bytes);
  const auto spilled = spill_slots.read_as<std::uint64_t>();
  for (std::uint32_t i = 0; i < 64; ++i)
    EXPECT_EQ(spilled[i], (first + (5000 + i) * page_bytes) | kernels::kPageSpilled);
}

}  // namespace
}  // namespace bitsparse
#endif
