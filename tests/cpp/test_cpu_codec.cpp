// The CPU codec against the bit-by-bit reference, for every instruction set that this processor has.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/codec.h"
#include "cpu/tile_codec.h"
#include "dtype.h"
#include "reference_codec.h"

namespace bitsparse {
namespace {

using reference::Bytes;

constexpr DType kDTypes[] = {DType::bfloat16, DType::float16, DType::float32, DType::float8_e4m3fn, DType::float8_e5m2};
constexpr Codec kCodecs[] = {Codec::raw, Codec::signless, Codec::tight};
constexpr Keep kKeeps[] = {Keep::positive, Keep::nonzero};

at::Tensor tensor_of(const Bytes& data, DType dtype) {
  at::Tensor t =
      at::empty({static_cast<std::int64_t>(data.size()) / element_bytes(dtype)}, at::TensorOptions(scalar_type(dtype)));
  if (!data.empty()) std::memcpy(t.mutable_data_ptr(), data.data(), data.size());
  return t;
}
at::Tensor packed_tensor(const Bytes& data) {
  at::Tensor t = at::empty({static_cast<std::int64_t>(data.size())}, at::TensorOptions(at::kByte));
  if (!data.empty()) std::memcpy(t.mutable_data_ptr(), data.data(), data.size());
  return t;
}
Bytes bytes_of(const at::Tensor& t) {
  const auto* begin = static_cast<const std::uint8_t*>(t.const_data_ptr());
  return Bytes(begin, begin + t.nbytes());
}

// Guarded and poisoned, so that missing and stray writes show.
Bytes unpack(const at::Tensor& packed, DType dtype) {
  constexpr std::size_t kGuard = 256;
  const PackedHeader header = cpu::validate(packed, /*deep=*/false);
  const std::size_t size = header.numel * static_cast<std::size_t>(element_bytes(dtype));
  Bytes buffer(size + 2 * kGuard, 0xa5);
  cpu::unpack(packed, buffer.data() + kGuard);
  for (std::size_t i = 0; i < kGuard; ++i) {
    EXPECT_EQ(buffer[i], 0xa5) << "written before the output";
    EXPECT_EQ(buffer[kGuard + size + i], 0xa5) << "written after the output";
  }
  return Bytes(buffer.begin() + kGuard, buffer.end() - kGuard);
}

Bytes elements(const std::vector<std::uint32_t>& patterns, DType dtype) {
  Bytes out;
  for (std::uint32_t p : patterns) {
    for (int b = 0; b < element_bytes(dtype); ++b) out.push_back(static_cast<std::uint8_t>(p >> (8 * b)));
  }
  return out;
}

// Each test runs once for every instruction set.
class CpuCodec : public ::testing::TestWithParam<cpu::Isa> {
 protected:
  void SetUp() override {
    if (!cpu::isa_available(GetParam())) GTEST_SKIP() << "this processor or compiler lacks the instruction set";
    before_ = cpu::current_isa();
    cpu::force_isa(GetParam());
  }
  void TearDown() override {
    if (!IsSkipped()) cpu::force_isa(before_);
  }

  // Packs as the reference does, and restores what the reference says.
  static void check(const Bytes& data, DType dtype, Codec codec, Keep keep, reference::Kinds* kinds = nullptr) {
    SCOPED_TRACE(::testing::Message() << "dtype " << static_cast<int>(dtype) << " codec " << static_cast<int>(codec)
                                      << " keep " << static_cast<int>(keep) << " bytes " << data.size());
    const at::Tensor packed = cpu::pack(tensor_of(data, dtype), dtype, codec, keep);
    ASSERT_TRUE(bytes_of(packed) == reference::pack(data, dtype, codec, keep, kinds)) << "not the canonical bytes";
    const PackedHeader header = cpu::validate(packed, /*deep=*/true);
    EXPECT_EQ(header.numel * static_cast<std::size_t>(element_bytes(dtype)), data.size());
    const Bytes expected = reference::restored(data, dtype, keep);
    ASSERT_TRUE(unpack(packed, dtype) == expected) << "not the original bits";
    ASSERT_TRUE(reference::unpack(bytes_of(packed)) == expected) << "the reference decoder disagrees";
  }

 private:
  cpu::Isa before_{};
};

INSTANTIATE_TEST_SUITE_P(Isa, CpuCodec, ::testing::Values(cpu::Isa::portable, cpu::Isa::avx2, cpu::Isa::avx512),
                         [](const ::testing::TestParamInfo<cpu::Isa>& info) {
                           return info.param == cpu::Isa::portable ? "portable"
                                  : info.param == cpu::Isa::avx2   ? "avx2"
                                                                   : "avx512";
                         });

// Kept elements with probability `density`: normal values of a few binades, now and then any pattern at all; the others
// are zeros, negative zeros and negative numbers.
Bytes random_data(std::int64_t n, DType dtype, double density, double wild, std::mt19937_64& rng) {
  const reference::Rules r = reference::rules_of(dtype);
  std::uniform_real_distribution<double> uniform;
  const std::uint32_t one = ((1u << (r.exponent_bits - 1)) - 1) << r.mantissa_bits;
  const std::uint32_t sign = 1u << (r.bits - 1);
  std::vector<std::uint32_t> patterns;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto bits = static_cast<std::uint32_t>(rng());
    const std::uint32_t value = one - (bits % (r.exponent_bits > 4 ? 6u << r.mantissa_bits : 2u << r.mantissa_bits));
    if (uniform(rng) >= density) {
      const double kind = uniform(rng);
      patterns.push_back(kind < 0.6 ? 0 : kind < 0.7 ? sign : sign | value);
    } else if (uniform(rng) < wild) {
      patterns.push_back(bits & (sign | (sign - 1)));
    } else {
      patterns.push_back(value);
    }
  }
  return elements(patterns, dtype);
}

TEST_P(CpuCodec, EveryPatternOfOneAndTwoBytes) {
  std::mt19937_64 rng(1);
  for (DType dtype : kDTypes) {
    if (element_bytes(dtype) == 4) continue;
    std::vector<std::uint32_t> patterns(std::size_t{1} << (8 * element_bytes(dtype)));
    std::iota(patterns.begin(), patterns.end(), 0u);
    const Bytes ordered = elements(patterns, dtype);
    std::shuffle(patterns.begin(), patterns.end(), rng);
    const Bytes shuffled = elements(patterns, dtype);
    for (Codec codec : kCodecs) {
      for (Keep keep : kKeeps) {
        check(ordered, dtype, codec, keep);
        check(shuffled, dtype, codec, keep);
      }
    }
  }
}

// Each pattern as the only element of a tensor, in a tensor that is otherwise zero, and among equal ones: a NaN, an
// infinity or a subnormal must not depend on its neighbours.
TEST_P(CpuCodec, EdgePatternsAloneAndAmongOthers) {
  for (DType dtype : kDTypes) {
    const reference::Rules r = reference::rules_of(dtype);
    const std::uint32_t sign = 1u << (r.bits - 1);
    const std::uint32_t top = ((1u << r.exponent_bits) - 1) << r.mantissa_bits;
    for (std::uint32_t p : {0u, 1u, 2u, top - 1, top, top + 1, top | 1u << (r.mantissa_bits - 1), sign - 2, sign - 1}) {
      for (std::uint32_t pattern : {p, p | sign}) {
        std::vector<std::uint32_t> among(1100, 0);
        among[1030] = pattern;
        std::vector<std::uint32_t> equal(1100, pattern);
        for (Codec codec : kCodecs) {
          for (Keep keep : kKeeps) {
            check(elements({pattern}, dtype), dtype, codec, keep);
            check(elements(among, dtype), dtype, codec, keep);
            check(elements(equal, dtype), dtype, codec, keep);
          }
        }
      }
    }
  }
}

TEST_P(CpuCodec, SizesAndDensities) {
  std::mt19937_64 rng(2);
  reference::Kinds kinds;
  for (std::int64_t n : {0, 1, 7, 31, 32, 1023, 1024, 1025, 2047, 2048, 2049, 8191, 8192, 8193, 30011}) {
    for (DType dtype : kDTypes) {
      for (double density : {0.0, 0.003, 0.05, 0.2, 0.5, 0.9, 0.97, 1.0}) {
        const Bytes data = random_data(n, dtype, density, 0.001, rng);
        for (Codec codec : kCodecs) {
          // The reference is slow: all sizes with both keeps would take minutes.
          check(data, dtype, codec, n > 8193 || density == 0.2 ? Keep::positive : kKeeps[rng() % 2], &kinds);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(kinds.flat, 0);
  EXPECT_GT(kinds.two_level, 0);
  EXPECT_GT(kinds.dense, 0);
  EXPECT_GT(kinds.empty, 0);
}

// Every width of `tight`, with and without a reference, in both keeps.
TEST_P(CpuCodec, EveryWidth) {
  std::mt19937_64 rng(3);
  for (DType dtype : kDTypes) {
    const int bits = 8 * element_bytes(dtype);
    std::vector<bool> seen(static_cast<std::size_t>(bits) + 1, false);
    for (int width = bits / 2; width <= bits; ++width) {
      for (bool high : {false, true}) {
        std::vector<std::uint32_t> patterns;
        const std::uint64_t span = std::uint64_t{1} << width, all = std::uint64_t{1} << bits;
        const std::uint64_t base = high ? (all - span) / 2 : 0;
        for (int i = 0; i < block_elements(dtype); ++i) {
          const std::uint64_t p = base + rng() % span;
          patterns.push_back(i % 3 ? 0 : static_cast<std::uint32_t>(p));
        }
        patterns[3] = static_cast<std::uint32_t>(base + span - 1);
        patterns[6] = static_cast<std::uint32_t>(base);
        const Bytes data = elements(patterns, dtype);
        for (Keep keep : kKeeps) {
          check(data, dtype, Codec::tight, keep);
          const Bytes packed = reference::pack(data, dtype, Codec::tight, keep);
          std::uint32_t header;
          std::memcpy(&header, packed.data() + 80, sizeof header);
          seen[1 + (header >> 13 & (bits == 32 ? 31 : 15))] = true;
        }
      }
    }
    for (int width = bits / 2; width <= bits; ++width) EXPECT_TRUE(seen[static_cast<std::size_t>(width)]) << width;
  }
}

// Around the number of kept elements from which on a block needs no mask, with the narrowest codes.
TEST_P(CpuCodec, NearlyDenseBlocks) {
  for (DType dtype : kDTypes) {
    const int block = block_elements(dtype), least = block - block / (4 * element_bytes(dtype));
    reference::Kinds kinds;
    for (int kept = least - 12; kept <= least + 12; ++kept) {
      std::vector<std::uint32_t> patterns(static_cast<std::size_t>(block), 0);
      for (int i = 0; i < kept; ++i) patterns[static_cast<std::size_t>(i * 7 % block)] = 1 + i % 15;
      for (Codec codec : kCodecs) check(elements(patterns, dtype), dtype, codec, Keep::positive, &kinds);
    }
    EXPECT_GT(kinds.dense, 0);
    EXPECT_GT(kinds.flat + kinds.two_level, 0);
  }
}

TEST_P(CpuCodec, AnyAlignmentOfInputPackedAndOutput) {
  std::mt19937_64 rng(4);
  for (DType dtype : kDTypes) {
    const Bytes data = random_data(9001, dtype, 0.3, 0.01, rng);
    const Bytes expected_packed = reference::pack(data, dtype, Codec::tight, Keep::nonzero);
    for (std::size_t shift : {1, 2, 3, 5, 8, 15}) {
      Bytes in(data.size() + 64), packed_buffer(expected_packed.size() + 64), out(data.size() + 64);
      std::memcpy(in.data() + shift, data.data(), data.size());
      const at::Tensor shifted = at::from_blob(in.data() + shift, {9001}, at::TensorOptions(scalar_type(dtype)));
      const at::Tensor packed = cpu::pack(shifted, dtype, Codec::tight, Keep::nonzero);
      ASSERT_TRUE(bytes_of(packed) == expected_packed);
      std::memcpy(packed_buffer.data() + shift, expected_packed.data(), expected_packed.size());
      const at::Tensor moved =
          at::from_blob(packed_buffer.data() + shift, {packed.numel()}, at::TensorOptions(at::kByte));
      cpu::validate(moved, /*deep=*/true);
      cpu::unpack(moved, out.data() + shift);
      ASSERT_EQ(std::memcmp(out.data() + shift, data.data(), data.size()), 0);
    }
  }
}

TEST_P(CpuCodec, ThreadsDoNotChangeTheBytes) {
  std::mt19937_64 rng(5);
  const int threads = at::get_num_threads();
  const Bytes data = random_data(1'000'003, DType::bfloat16, 0.2, 0.001, rng);
  const at::Tensor input = tensor_of(data, DType::bfloat16);
  at::set_num_threads(1);
  const at::Tensor one = cpu::pack(input, DType::bfloat16, Codec::tight, Keep::nonzero);
  at::set_num_threads(5);
  const at::Tensor five = cpu::pack(input, DType::bfloat16, Codec::tight, Keep::nonzero);
  EXPECT_TRUE(bytes_of(one) == bytes_of(five));
  EXPECT_TRUE(unpack(five, DType::bfloat16) == data);
  at::set_num_threads(threads);
}

// Whatever the data: 1% above dense, the fixed header, and for the last, partial block a mask and padding.
TEST_P(CpuCodec, SizeBound) {
  std::mt19937_64 rng(6);
  for (DType dtype : kDTypes) {
    for (std::int64_t n : {1, 1000, 1024, 2047, 5000, 8192, 100'000}) {
      for (double density : {0.5, 0.85, 0.93, 0.97, 0.995, 1.0}) {
        for (double wild : {0.0, 0.01, 1.0}) {
          const Bytes data = random_data(n, dtype, density, wild, rng);
          for (Codec codec : kCodecs) {
            const at::Tensor packed = cpu::pack(tensor_of(data, dtype), dtype, codec, Keep::nonzero);
            EXPECT_LE(static_cast<double>(packed.numel()),
                      1.01 * static_cast<double>(data.size()) + (element_bytes(dtype) == 1 ? 384 : 272))
                << "dtype " << static_cast<int>(dtype) << " n " << n << " density " << density;
          }
        }
      }
    }
  }
}

// Flipped, overwritten and missing bytes either throw or restore something; under a sanitizer this also shows stray
// reads.
TEST_P(CpuCodec, CorruptedInputNeverCrashes) {
  std::mt19937_64 rng(7);
  int thrown = 0, restored = 0;
  for (int round = 0; round < 4000; ++round) {
    const DType dtype = kDTypes[rng() % 5];
    const auto n = static_cast<std::int64_t>(rng() % 12000);
    const Bytes data = random_data(n, dtype, (rng() % 6) * 0.2, 0.01, rng);
    const at::Tensor good = cpu::pack(tensor_of(data, dtype), dtype, kCodecs[rng() % 3], kKeeps[rng() % 2]);
    Bytes bytes = bytes_of(good);
    for (std::size_t i = rng() % 4 + 1; i > 0; --i) {
      // Mostly where it hurts: tile table, block headers, presence words.
      const std::size_t range = rng() % 3 == 0 ? bytes.size() : std::min<std::size_t>(bytes.size(), 192);
      const std::size_t at = rng() % range;
      if (rng() % 2) {
        bytes[at] ^= static_cast<std::uint8_t>(1u << (rng() % 8));
      } else {
        bytes[at] = static_cast<std::uint8_t>(rng());
      }
    }
    if (rng() % 8 == 0) bytes.resize(rng() % bytes.size());
    const at::Tensor bad = packed_tensor(bytes);
    bool shallow = false;
    std::uint64_t numel = 0;
    try {
      numel = cpu::validate(bad, /*deep=*/false).numel;
      shallow = true;
    } catch (const c10::Error&) {
      ++thrown;
    }
    if (!shallow || numel > 1'000'000) continue;
    bool deep = false;
    try {
      cpu::validate(bad, /*deep=*/true);
      deep = true;
    } catch (const c10::Error&) {
      ++thrown;
    }
    // Whatever the deep check says, unpacking after the shallow one is safe and comes to the same verdict.
    const auto out_dtype = static_cast<DType>(bytes[6]);
    Bytes out(numel * static_cast<std::size_t>(element_bytes(out_dtype)));
    try {
      cpu::unpack(bad, out.data());
      EXPECT_TRUE(deep);
      EXPECT_TRUE(out == reference::unpack(bytes));
      ++restored;
    } catch (const c10::Error&) {
      EXPECT_FALSE(deep);
    }
  }
  EXPECT_GT(thrown, 500);
  EXPECT_GT(restored, 200);
}

std::string error_of(const Bytes& bytes) {
  try {
    cpu::validate(packed_tensor(bytes), /*deep=*/true);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST_P(CpuCodec, ErrorsSayWhatWasExpectedAndWhatCame) {
  const Bytes good = reference::pack(elements({0x3fc0, 0xc000, 0, 0x3e80}, DType::bfloat16), DType::bfloat16,
                                     Codec::tight, Keep::positive);
  ASSERT_EQ(error_of(good), "");
  const auto with = [&](std::size_t at, std::uint8_t value) {
    Bytes bytes = good;
    bytes.at(at) = value;
    return error_of(bytes);
  };
  const auto expect = [](const std::string& error, const std::string& text) {
    EXPECT_NE(error.find(text), std::string::npos) << "expected \"" << text << "\" in \"" << error << "\"";
  };
  expect(error_of(Bytes(good.begin(), good.begin() + 63)), "expected at least 64 bytes, got 63");
  expect(with(0, 'X'), "expected it to start with the bytes 'BSPT', got 88 83 80 84");
  expect(with(4, 2), "expected format version 3, got 2");
  expect(with(6, 5), "expected a dtype number of 0 to 4, got 5");
  expect(with(7, 3), "expected a codec number of 0 to 2, got 3");
  expect(with(8, 2), "expected a keep number of 0 or 1, got 2");
  expect(with(9, 1), "expected geometry 0 (linear), got 1");
  expect(with(10, 8), "expected 4 blocks a tile, got 8");
  expect(with(13, 8), "expected blocks of 1024 elements, got 2048");
  expect(with(23, 0x80), "elements, got 9223372036854775812");
  expect(with(24, 2), "expected 1 tiles for 4 elements, got 2");
  expect(with(32, 80), "expected 80 payload bytes after the tile table, got 64");
  expect(with(40, 3), "expected the header's count of kept elements to be the tiles' 2, got 3");
  expect(with(48, 1), "expected reserved header fields to be 0, got 1 and 0");
  expect(with(64, 1), "tile 0: expected its blob to start at unit 0, got 1");
  expect(with(68, 0x50), "tile 0: expected its blob to end within 4 units, got 5");
  expect(with(70, 3), "tile 0, block 3: kept elements of the tile, at most: expected 2, got 3");
  expect(with(71, 0x80), "tile 0: expected unused bits of its table entry to be 0");
  expect(with(80, 5), "tile 0, block 0: body offset in words: expected 4, got 5");
  expect(with(82, 0x82), "tile 0, block 0: code width, at least: expected 8, got 1");
  expect(with(96, 0xff), "tile 0, block 0: ");
  Bytes wide = reference::pack({0x38}, DType::float8_e4m3fn, Codec::raw, Keep::positive);
  wide[81] |= 0xe0, wide[82] |= 1;  // the header's field has room for 16 bits
  expect(error_of(wide), "tile 0, block 0: code width, at most: expected 8, got 16");
  Bytes raw = reference::pack({0x80, 0x3f}, DType::bfloat16, Codec::raw, Keep::positive);
  raw[82] |= 2;
  expect(error_of(raw), "tile 0, block 0: mask kind: expected 0, got 1");
  EXPECT_THROW(cpu::validate(at::empty({4, 64}, at::TensorOptions(at::kByte)), false), c10::Error);
  EXPECT_THROW(cpu::validate(at::empty({64}, at::TensorOptions(at::kFloat)), false), c10::Error);
  EXPECT_THROW(cpu::validate(at::Tensor(), false), c10::Error);
  EXPECT_THROW(cpu::pack(at::empty({4}, at::TensorOptions(at::kFloat)), DType::bfloat16, Codec::raw, Keep::nonzero),
               c10::Error);
  EXPECT_THROW(dtype_of(at::kDouble, "x"), c10::TypeError);
}

std::string data_folder() {
  const std::string here = __FILE__;
  return here.substr(0, here.find_last_of('/')) + "/../data/";
}

Bytes from_hex(const std::string& hex) {
  Bytes out;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    out.push_back(static_cast<std::uint8_t>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  }
  return out;
}

// The value of a string or number field of one flat JSON object.
std::string field(const std::string& object, const std::string& name) {
  const std::string key = "\"" + name + "\": ";
  const std::size_t at = object.find(key);
  if (at == std::string::npos) throw std::runtime_error("no field " + name);
  const std::size_t begin = at + key.size();
  if (object[begin] == '"') return object.substr(begin + 1, object.find('"', begin + 1) - begin - 1);
  return object.substr(begin, object.find_first_of(",}\n", begin) - begin);
}

// Files written by earlier builds: these bytes decode forever, and version 3 never encodes otherwise.
TEST_P(CpuCodec, GoldenFile) {
  std::ifstream file(data_folder() + "format_v3.json");
  ASSERT_TRUE(file) << "tests/data/format_v3.json is missing";
  std::stringstream text;
  text << file.rdbuf();
  const std::string json = text.str();
  int entries = 0;
  for (std::size_t begin = json.find("{\"name\""); begin != std::string::npos;
       begin = json.find("{\"name\"", begin + 1)) {
    const std::string entry = json.substr(begin, json.find('}', begin) - begin + 1);
    SCOPED_TRACE(field(entry, "name"));
    const auto dtype = static_cast<DType>(std::stoi(field(entry, "dtype")));
    const auto codec = static_cast<Codec>(std::stoi(field(entry, "codec")));
    const auto keep = static_cast<Keep>(std::stoi(field(entry, "keep")));
    const Bytes input = from_hex(field(entry, "input")), packed = from_hex(field(entry, "packed"));
    cpu::validate(packed_tensor(packed), /*deep=*/true);
    EXPECT_TRUE(unpack(packed_tensor(packed), dtype) == from_hex(field(entry, "restored")));
    EXPECT_TRUE(bytes_of(cpu::pack(tensor_of(input, dtype), dtype, codec, keep)) == packed);
    EXPECT_TRUE(reference::pack(input, dtype, codec, keep) == packed);
    ++entries;
  }
  EXPECT_GE(entries, 20);
}

// Real pre-activations of a trained model (tests/data/README.md): exact, and as small as `tight` is meant to be.
TEST_P(CpuCodec, RealActivations) {
  std::ifstream file(data_folder() + "activations.safetensors", std::ios::binary);
  ASSERT_TRUE(file) << "tests/data/activations.safetensors is missing";
  std::uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes);
  file.seekg(static_cast<std::streamoff>(sizeof header_bytes + header_bytes));
  Bytes data(4 * 40 * 3072 * 2);
  file.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(data.size()));
  ASSERT_TRUE(file);
  const auto bits_per_element = [&](Codec codec) {
    const at::Tensor packed = cpu::pack(tensor_of(data, DType::bfloat16), DType::bfloat16, codec, Keep::positive);
    EXPECT_TRUE(unpack(packed, DType::bfloat16) == reference::restored(data, DType::bfloat16, Keep::positive));
    return 16.0 * static_cast<double>(packed.numel()) / static_cast<double>(data.size());
  };
  const double raw = bits_per_element(Codec::raw), signless = bits_per_element(Codec::signless),
               tight = bits_per_element(Codec::tight);
  RecordProperty("raw", std::to_string(raw));
  RecordProperty("signless", std::to_string(signless));
  RecordProperty("tight", std::to_string(tight));
  EXPECT_LT(tight, 3.35);
  EXPECT_LT(tight, 0.8 * signless);
  EXPECT_LT(signless, raw);
  data.resize(2 * 20'000);  // the reference is slow
  for (Codec codec : kCodecs) check(data, DType::bfloat16, codec, Keep::positive);
}

// Element counts and byte offsets past 2^31. Takes 5 GiB.
TEST_P(CpuCodec, MoreThan2To31Elements) {
  if (std::getenv("BITSPARSE_TEST_LARGE") == nullptr) GTEST_SKIP() << "set BITSPARSE_TEST_LARGE=1 (needs 5 GiB)";
  const std::int64_t n = (std::int64_t{1} << 31) + 1025;
  const at::Tensor t = at::empty({n}, at::TensorOptions(at::kFloat8_e5m2));
  auto* data = static_cast<std::uint8_t*>(t.mutable_data_ptr());
  for (std::int64_t i = 0; i < n; ++i) data[i] = (i % 3 == 0 || i >= n - 2000) ? static_cast<std::uint8_t>(i % 251) : 0;
  const at::Tensor packed = cpu::pack(t, DType::float8_e5m2, Codec::raw, Keep::nonzero);
  const at::Tensor out = at::empty({n}, at::TensorOptions(at::kByte));
  EXPECT_EQ(cpu::validate(packed, /*deep=*/true).numel, static_cast<std::uint64_t>(n));
  cpu::unpack(packed, out.mutable_data_ptr());
  EXPECT_EQ(std::memcmp(out.const_data_ptr(), data, static_cast<std::size_t>(n)), 0);
}

}  // namespace
}  // namespace bitsparse
