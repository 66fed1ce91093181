// Matrix products that compress, or that take a gradient from what was compressed. With rows of the identity as one
// factor the product is known to the last bit, whatever the order of its sums.
#include <gtest/gtest.h>

#include "gpu.h"

class LinearKernels : public GpuTest {};

#ifndef BITSPARSE_WITH_CUDA
TEST_F(LinearKernels, All) {}
#else

#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include "launch.h"

namespace bitsparse {
namespace {

using kernels::BlobStore;
using kernels::Epilogue;

constexpr DType kDType = DType::bfloat16;
constexpr Codec kCodecs[] = {Codec::raw, Codec::signless, Codec::tight};
constexpr Epilogue kActivations[] = {Epilogue::relu, Epilogue::relu_squared};

// The second depth is long, the others short: they have kernels of their own.
struct Shape {
  std::int64_t rows, columns, depth;
};
constexpr Shape kShapes[] = {{512, 512, 256}, {256, 768, 2048}, {2304, 256, 320}};

void run(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

bool is_hopper() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major == 9 && minor == 0;
}
#define SKIP_UNLESS_HOPPER() \
  if (!is_hopper()) GTEST_SKIP() << "GPU test: these kernels need compute capability 9.0"

at::TensorOptions on_gpu(at::ScalarType type) { return at::TensorOptions(type).device(at::kCUDA); }

// A contiguous payload at its worst-case size.
struct Memory {
  explicit Memory(std::int64_t numel)
      : tiles(at::zeros({tile_count(kDType, numel)}, on_gpu(at::kLong))),
        control(at::zeros({sizeof(kernels::LeaseControl)}, on_gpu(at::kByte))),
        payload(at::full({max_payload_units(kDType, numel) * kUnitBytes}, 0xa5, on_gpu(at::kByte))) {}
  BlobStore store(std::int64_t columns = 0) const {
    BlobStore s{};
    s.tiles = reinterpret_cast<std::uint64_t*>(tiles.data_ptr());
    s.control = reinterpret_cast<kernels::LeaseControl*>(control.data_ptr());
    s.payload = payload.data_ptr<std::uint8_t>();
    s.columns = static_cast<std::uint32_t>(columns);
    return s;
  }
  std::vector<std::uint8_t> blob(std::int64_t tile) const {
    const auto entry = static_cast<std::uint64_t>(tiles[tile].item<std::int64_t>());
    const auto bytes = payload
                           .narrow(0, static_cast<std::int64_t>(entry_offset(entry)) * kUnitBytes,
                                   std::int64_t{entry_size(entry)} * kUnitBytes)
                           .cpu();
    const auto* data = bytes.data_ptr<std::uint8_t>();
    return {data, data + bytes.numel()};
  }
  at::Tensor tiles, control, payload;
};

// Finite values of all kinds, with areas that are empty, dense, and of few magnitudes.
at::Tensor values(std::int64_t rows, std::int64_t columns, double shift = -0.8) {
  at::manual_seed(7);
  at::Tensor t = at::randn({rows, columns}, on_gpu(at::kFloat)).add_(shift);
  t.narrow(0, 0, 64).abs_().neg_();
  t.narrow(0, 64, 64).abs_().add_(1e-3);
  t = t.to(at::kBFloat16);
  t[5][6] = -0.0;
  t[7][8] = 3e38;
  return t;
}

// Rows of the identity, over and over.
at::Tensor selector(std::int64_t rows, std::int64_t depth) {
  return at::eye(depth, on_gpu(at::kBFloat16)).repeat({rows / depth + 1, 1}).narrow(0, 0, rows).contiguous();
}

// A matrix as its patches, one after the other, and back.
at::Tensor to_patches(const at::Tensor& m) {
  return m.view({m.size(0) / Patch::kRows, Patch::kRows, m.size(1) / Patch::kColumns, Patch::kColumns})
      .transpose(1, 2)
      .contiguous();
}
at::Tensor from_patches(const at::Tensor& patches, const at::Tensor& like) {
  return patches.transpose(1, 2).contiguous().view_as(like);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) { return a.view(at::kShort).equal(b.view(at::kShort)); }

// What linear_compress makes of x wᵀ + bias.
struct Compressed {
  Compressed(const Shape& shape, Codec codec, Epilogue activation, bool biased)
      : x(selector(shape.rows, shape.depth)),
        w(values(shape.columns, shape.depth)),
        out(at::full({shape.rows, shape.columns}, 7, on_gpu(at::kBFloat16))),
        memory(out.numel()) {
    h = w.t().repeat({shape.rows / shape.depth + 1, 1}).narrow(0, 0, shape.rows).contiguous();
    at::Tensor bias;
    if (biased) {
      bias = at::randn({shape.columns}, on_gpu(at::kBFloat16));
      h = h.to(at::kFloat).add(bias.to(at::kFloat)).to(at::kBFloat16);
    } else {
      h = h.add(0);  // sums are never -0
    }
    run(kernels::linear_compress(x.data_ptr(), w.data_ptr(), biased ? bias.data_ptr() : nullptr, out.data_ptr(),
                                 shape.rows, shape.columns, shape.depth, codec, activation, memory.store(shape.columns),
                                 nullptr));
    run(cudaDeviceSynchronize());
  }
  at::Tensor x, w, h, out;
  Memory memory;
};

TEST_F(LinearKernels, BlobsAreThoseOfPatches) {
  SKIP_UNLESS_HOPPER();
  for (const Shape& shape : kShapes)
    for (Codec codec : kCodecs)
      for (Epilogue activation : kActivations)
        for (bool biased : {false, true}) {
          SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.columns << " x " << shape.depth << ", codec "
                                          << static_cast<int>(codec) << ", activation " << static_cast<int>(activation)
                                          << ", bias " << biased);
          const Compressed got(shape, codec, activation, biased);
          const at::Tensor patches = to_patches(got.h);
          at::Tensor expected = at::empty_like(patches);
          const Memory memory(patches.numel());
          run(kernels::compress(patches.data_ptr(), expected.data_ptr(), patches.numel(), kDType, codec, Keep::positive,
                                activation, memory.store(), nullptr));
          run(cudaDeviceSynchronize());
          ASSERT_TRUE(same_bits(got.out, from_patches(expected, got.out)));
          for (std::int64_t tile = 0; tile < memory.tiles.numel(); ++tile)
            ASSERT_EQ(got.memory.blob(tile), memory.blob(tile)) << "tile " << tile;
          const auto kept = [](const Memory& m) {
            return m.tiles.bitwise_right_shift(kEntryOffsetBits);  // and sizes
          };
          ASSERT_TRUE(kept(got.memory).equal(kept(memory)));
        }
}

TEST_F(LinearKernels, PatchesAreRestored) {
  SKIP_UNLESS_HOPPER();
  for (const Shape& shape : kShapes)
    for (Codec codec : kCodecs)
      for (Epilogue activation : kActivations) {
        const Compressed from(shape, codec, activation, true);
        const BlobStore store = from.memory.store(shape.columns);
        at::Tensor out = at::full_like(from.out, 7);
        run(kernels::restore(out.data_ptr(), out.numel(), kDType, codec, Keep::positive, activation, store, nullptr));
        ASSERT_TRUE(same_bits(out, from.out));

        const at::Tensor grad = at::randn_like(from.out);
        at::Tensor in_place = grad.clone();
        run(kernels::gradient(in_place.data_ptr(), out.numel(), kDType, codec, activation, store, nullptr));
        at::Tensor expected = grad;
        if (activation == Epilogue::relu_squared) expected = expected.mul(from.h.relu().mul(2));
        expected = at::where(from.h.gt(0), expected, at::zeros_like(expected));
        ASSERT_TRUE(same_bits(in_place, expected));
      }
}

TEST_F(LinearKernels, GradientsOfProducts) {
  SKIP_UNLESS_HOPPER();
  for (const Shape& shape : kShapes)
    for (Codec codec : kCodecs)
      for (Epilogue activation : kActivations) {
        SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.columns << " x " << shape.depth << ", codec "
                                        << static_cast<int>(codec) << ", activation " << static_cast<int>(activation));
        const Compressed from(shape, codec, activation, true);
        const BlobStore store = from.memory.store(shape.columns);
        const at::Tensor w = values(shape.depth, shape.columns, 0);
        at::Tensor expected = w.add(0).repeat({shape.rows / shape.depth + 1, 1}).narrow(0, 0, shape.rows).contiguous();
        run(kernels::gradient(expected.data_ptr(), expected.numel(), kDType, codec, activation, store, nullptr));
        at::Tensor got = at::full_like(expected, 7);
        run(kernels::linear_gradient(from.x.data_ptr(), w.data_ptr(), got.data_ptr(), shape.rows, shape.columns,
                                     shape.depth, activation, store, nullptr));
        run(cudaDeviceSynchronize());
        ASSERT_TRUE(same_bits(got, expected));
      }
}

TEST_F(LinearKernels, KeepsSubnormals) {
  SKIP_UNLESS_HOPPER();
  const at::Tensor x = selector(256, 256);
  const at::Tensor w = at::arange(256 * 256, on_gpu(at::kInt)).remainder(128).to(at::kShort).view({256, 256});
  at::Tensor out = at::empty({256, 256}, on_gpu(at::kBFloat16));
  const Memory memory(out.numel());
  run(kernels::linear_compress(x.data_ptr(), w.data_ptr(), nullptr, out.data_ptr(), 256, 256, 256, Codec::tight,
                               Epilogue::relu, memory.store(256), nullptr));
  run(cudaDeviceSynchronize());
  EXPECT_TRUE(out.view(at::kShort).equal(w.t()));
}

TEST(LinearKernelSizes, MultiplesOfTiles) {
  EXPECT_TRUE(kernels::linear_compresses(256, 256, 256, 9, 0));
  EXPECT_FALSE(kernels::linear_compresses(256, 256, 256, 8, 0));
  EXPECT_FALSE(kernels::linear_compresses(256, 256, 256, 10, 0));
  EXPECT_FALSE(kernels::linear_compresses(0, 256, 256, 9, 0));
  EXPECT_FALSE(kernels::linear_compresses(128, 256, 256, 9, 0));
  EXPECT_FALSE(kernels::linear_compresses(256, 128, 256, 9, 0));
  EXPECT_FALSE(kernels::linear_compresses(256, 256, 192, 9, 0));
  EXPECT_FALSE(kernels::linear_compresses(256, 256, 288, 9, 0));
  EXPECT_TRUE(kernels::linear_gradient_pays(256, 256, 2048, 9, 0));
  EXPECT_FALSE(kernels::linear_gradient_pays(256, 256, 1024, 9, 0));
  EXPECT_FALSE(kernels::linear_gradient_pays(256, 128, 2048, 9, 0));
}

}  // namespace
}  // namespace bitsparse
#endif
