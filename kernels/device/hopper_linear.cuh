// A matrix product with work on its result in shared memory: activation functions that compress, or that need what was
// compressed. For sm_90a.
//
// Thread blocks stay and take tiles of 128 rows x 256 columns, in clusters of two that lie below each other and share
// w's part. One thread keeps the copies of x and w coming, two warpgroups multiply (64 rows each), and codec warps
// work on what came before: a multiplying warp leaves its 16 rows, rounded to bfloat16, in shared memory, and goes on
// with the next tile. Those 16 x 256 elements are a strip: four blocks of geometry `patch`, one tile of the format.
#pragma once

#include <cstdint>

#include "bitsparse/format.h"
#include "device/hopper.cuh"
#include "launch.h"

namespace bitsparse::kernels {

// Of the matrix product.
struct LinearTile {
  static constexpr int kRows = 128, kColumns = Patch::kTileColumns, kDepth = 64;
  static constexpr int kCluster = 2;
  static constexpr int kClusterRows = kCluster * kRows;
  static constexpr int kStrips = kRows / Patch::kRows;
  static constexpr int kXBytes = 2 * kRows * kDepth, kWBytes = 2 * kColumns * kDepth, kStageBytes = kXBytes + kWBytes;
  static constexpr int kStages = 3;
  // A transposed w comes in panels of as many columns as fit 128 bytes.
  static constexpr int kPanelColumns = 64, kPanelBytes = 2 * kPanelColumns * kDepth;
  // Clusters work on groups of this many rows of tiles, so that what they read together stays in L2.
  static constexpr int kGroupRows = 8;
};

// How the threads are shared out. Where the inner dimension is short, the codec is what takes time: eight warps of
// their own; else three beside the one that copies, and more registers for all. `HeaderBytes`, `SlotBytes`: what the
// codec needs in front of each strip, and a warp of it elsewhere.
template <bool ManyCodecWarps, int HeaderBytes, int SlotBytes>
struct LinearLayout {
  using L = BlockLayout<2>;
  static constexpr bool kManyCodecWarps = ManyCodecWarps;
  static constexpr int kCodecWarps = ManyCodecWarps ? 8 : 3;
  static constexpr int kThreads = 128 * (ManyCodecWarps ? 5 : 3);
  static constexpr int kCopyRegisters = ManyCodecWarps ? 32 : 136;
  static constexpr int kProductRegisters = ManyCodecWarps ? 160 : 184;
  static constexpr int kCodecRegisters = 64;  // of warpgroups of their own

  static constexpr int kHeaderBytes = HeaderBytes, kSlotBytes = SlotBytes;
  static constexpr int kBlockBytes = 4 * L::kBlockWords;
  static constexpr int kStripBytes = kHeaderBytes + L::kBlocksPerTile * kBlockBytes;
  static constexpr int kBiasBytes = 2 * LinearTile::kColumns;

  // Places in shared memory.
  static constexpr int kAlignment = 1024;  // of swizzled matrices
  static constexpr int kStrips = LinearTile::kStages * LinearTile::kStageBytes;
  static constexpr int kSlots = kStrips + LinearTile::kStrips * kStripBytes;
  static constexpr int kBias = kSlots + kCodecWarps * kSlotBytes;
  static constexpr int kBarriers = kBias + 2 * kBiasBytes;
  static constexpr int kSharedBytes = kAlignment + kBarriers + 8 * (2 * LinearTile::kStages + 3 * LinearTile::kStrips);
};

struct LinearShape {
  int rows, columns, depth;  // of the result, and of the sums: multiples of 256, 256 and 64
};

// Its number in the format.
struct PatchTiles {
  std::uint32_t columns;  // in tiles
  std::uint32_t count;
  __device__ explicit PatchTiles(const LinearShape& shape)
      : columns(shape.columns / Patch::kTileColumns), count(shape.rows / Patch::kRows * columns) {}
  __device__ std::uint32_t at(std::int64_t row, std::int64_t column) const {
    return static_cast<std::uint32_t>(row / Patch::kRows) * columns +
           static_cast<std::uint32_t>(column / Patch::kTileColumns);
  }
};

// The lane's i-th chunk of a block in a strip, as leave_strip leaves it.
__device__ __forceinline__ uint4 strip_chunk(const std::uint8_t* block, int i, int lane) {
  const int in_row = lane % Patch::kRowChunks, row = i * (kLanes / Patch::kRowChunks) + lane / Patch::kRowChunks;
  return *reinterpret_cast<const uint4*>(block + row * 128 + ((in_row ^ (row & 7)) << 4));
}

// Which tile is the n-th: down a group of rows, then the next column.
struct LinearRaster {
  int column_tiles, cluster_rows;

  __device__ explicit LinearRaster(const LinearShape& shape)
      : column_tiles(shape.columns / LinearTile::kColumns), cluster_rows(shape.rows / LinearTile::kClusterRows) {}
  __device__ int count() const { return column_tiles * cluster_rows; }
  // In tiles; the row is the cluster's first.
  __device__ int2 at(int n) const {
    const int per_group = LinearTile::kGroupRows * column_tiles, group = n / per_group, in_group = n % per_group;
    const int first = group * LinearTile::kGroupRows, rows = min(LinearTile::kGroupRows, cluster_rows - first);
    return make_int2(in_group / rows, LinearTile::kCluster * (first + in_group % rows));
  }
};

struct LinearBarriers {
  std::uint32_t base;
  __device__ std::uint32_t loaded(int stage) const { return base + 8 * stage; }
  __device__ std::uint32_t multiplied(int stage) const { return loaded(LinearTile::kStages + stage); }
  // A strip is full for tiles of one parity and of the other: of three codec warps one may ask for a tile's strip
  // before the other warpgroup has left that of the tile before. Two tiles before it has, as a tile has more steps than
  // stages.
  __device__ std::uint32_t full(int strip, int parity) const {
    return loaded(2 * LinearTile::kStages + parity * LinearTile::kStrips + strip);
  }
  __device__ std::uint32_t done(int strip) const { return full(strip, 2); }

  __device__ void init() const {
    for (int i = 0; i < LinearTile::kStages; ++i) {
      barrier_init<1>(loaded(i));
      barrier_init<2 * LinearTile::kCluster>(multiplied(i));  // both warpgroups of all thread blocks
    }
    for (int i = 0; i < LinearTile::kStrips; ++i) {
      barrier_init<1>(full(i, 0));
      barrier_init<1>(full(i, 1));
      barrier_init<1>(done(i));
    }
    show_barriers();
  }
};

// A ring of stages and the parity of the round.
struct LinearStage {
  int index = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    if (++index == LinearTile::kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

struct LinearOperands {
  CUtensorMap x, w;
  const void* bias;  // bfloat16, aligned to 16 bytes; null: none
  void* out;
  LinearShape shape;
  BlobStore store;
};

// By one thread.
template <class Config>
__device__ __forceinline__ void copy_operands(const LinearOperands& operands, std::uint32_t shared,
                                              const LinearBarriers& barriers, int first, int step) {
  const LinearRaster raster(operands.shape);
  const int rank = static_cast<int>(cluster_rank()), steps = operands.shape.depth / LinearTile::kDepth;
  constexpr int kHalf = LinearTile::kColumns / LinearTile::kCluster;
  LinearStage stage;
  for (int n = first, odd = 0; n < raster.count(); n += step, odd ^= 1) {
    const int2 tile = raster.at(n);
    const int row = (tile.y + rank) * LinearTile::kRows, column = tile.x * LinearTile::kColumns;
    for (int k = 0; k < steps; ++k) {
      const std::uint32_t loaded = barriers.loaded(stage.index);
      const std::uint32_t x = shared + stage.index * LinearTile::kStageBytes, w = x + LinearTile::kXBytes;
      const bool with_bias = k == 0 && operands.bias;
      barrier_wait(barriers.multiplied(stage.index), stage.parity ^ 1);
      barrier_expect(loaded, LinearTile::kStageBytes + (with_bias ? Config::kBiasBytes : 0));
      load_box(x, &operands.x, k * LinearTile::kDepth, row, loaded);
      const std::uint32_t half = w + rank * (LinearTile::kWBytes / 2);
      if constexpr (Config::kTransposedW) {
        load_box_to(3, half, &operands.w, column + rank * kHalf, k * LinearTile::kDepth, loaded);
        load_box_to(3, half + LinearTile::kPanelBytes, &operands.w, column + rank * kHalf + LinearTile::kPanelColumns,
                    k * LinearTile::kDepth, loaded);
      } else {
        load_box_to(3, half, &operands.w, k * LinearTile::kDepth, column + rank * kHalf, loaded);
      }
      // Two places in turns: with at least four steps a tile, nobody still looks at the last but one.
      if (with_bias) {
        const auto* from = static_cast<const std::uint8_t*>(operands.bias) + 2 * column;
        bulk_load(shared + Config::kBias + odd * Config::kBiasBytes, from, Config::kBiasBytes, loaded);
      }
      stage.advance();
    }
  }
}

// A warp's 16 rows of the sums, rounded, to its strip: columns in groups of 64, rows of 128 bytes, swizzled as stmatrix
// wants it. `bias`: shared address of the tile's. The tensor cores wait meanwhile: biases are on their way before they
// are needed.
template <bool Biased>
__device__ __forceinline__ void leave_strip(const float (&sum)[128], std::uint32_t strip, std::uint32_t bias,
                                            int lane) {
  constexpr int kStep = 4;  // groups of 8 columns
  const int row = lane & 15, chunk = lane >> 4;
  const std::uint32_t own = row * 128 + ((chunk ^ (row & 7)) << 4), own_bias = bias + 4 * (lane & 3);
  std::uint32_t biases[kStep], next[kStep];
  if constexpr (Biased) load_shared(own_bias, next);
#pragma unroll
  for (int j = 0; j < LinearTile::kColumns / 8; j += kStep) {
    if constexpr (Biased) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) biases[i] = next[i];
      if (j + kStep < LinearTile::kColumns / 8) load_shared(own_bias + 16 * (j + kStep), next);
    }
#pragma unroll
    for (int i = 0; i < kStep; i += 2) {
      std::uint32_t words[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        float2 pair = make_float2(sum[4 * (j + i) + 2 * q], sum[4 * (j + i) + 2 * q + 1]);
        if constexpr (Biased) {
          const float2 b = unpack_bfloat16(biases[i + q / 2]);
          pair = make_float2(__fadd_rn(pair.x, b.x), __fadd_rn(pair.y, b.y));
        }
        words[q] = pack_bfloat16(pair);
      }
      store_matrices(strip + (own ^ (((j + i) & 7) << 4)) + ((j + i) >> 3) * (Patch::kRows * 128), words);
    }
  }
}

// By a warpgroup; `half`: which of the tile's rows.
template <class Config>
__device__ __forceinline__ void multiply_tiles(const LinearOperands& operands, std::uint32_t shared,
                                               const LinearBarriers& barriers, int first, int step, int half) {
  const int tiles = LinearRaster(operands.shape).count(), steps = operands.shape.depth / LinearTile::kDepth;
  const int thread = threadIdx.x & 127, lane = thread & 31, strip = 4 * half + (thread >> 5);
  const std::uint32_t strip_at = shared + Config::kStrips + strip * Config::kStripBytes + Config::kHeaderBytes;
  // A stage is free when all thread blocks that got its part of w are through with it.
  const auto release = [&](int stage) {
    if (thread < LinearTile::kCluster) arrive_at(barriers.multiplied(stage), thread);
  };
  float sum[128];
  LinearStage stage;
  std::uint32_t odd = 0;
  for (int n = first; n < tiles; n += step, odd ^= 1) {
    int before = -1;
    for (int k = 0; k < steps; ++k) {
      barrier_wait(barriers.loaded(stage.index), stage.parity);
      const std::uint32_t x = shared + stage.index * LinearTile::kStageBytes + half * (LinearTile::kXBytes / 2);
      const std::uint32_t w = shared + stage.index * LinearTile::kStageBytes + LinearTile::kXBytes;
      begin_products();
#pragma unroll
      for (int part = 0; part < LinearTile::kDepth / 16; ++part) {
        constexpr bool kTransposed = Config::kTransposedW;
        const auto columns = [&](std::uint32_t from) {
          return kTransposed ? matrix_at(from + 16 * 128 * part, LinearTile::kPanelBytes) : matrix_at(from + 32 * part);
        };
        const std::uint64_t rows = matrix_at(x + 32 * part);
        const bool add = k + part > 0;
        // One instruction can't have more registers than the kernel starts with.
        if constexpr (Config::kManyCodecWarps) {
          multiply<kTransposed>(reinterpret_cast<float(&)[64]>(sum[0]), rows, columns(w), add);
          multiply<kTransposed>(reinterpret_cast<float(&)[64]>(sum[64]), rows, columns(w + LinearTile::kWBytes / 2),
                                add);
        } else {
          multiply<kTransposed>(sum, rows, columns(w), add);
        }
      }
      commit_products();
      if (before >= 0) {
        wait_for_products<1>();
        release(before);
      }
      before = stage.index;
      stage.advance();
    }
    wait_for_products<0>();
    settle(sum);
    release(before);
    barrier_wait(barriers.done(strip), odd ^ 1);
    if (operands.bias)
      leave_strip<true>(sum, strip_at, shared + Config::kBias + odd * Config::kBiasBytes, lane);
    else
      leave_strip<false>(sum, strip_at, 0, lane);
    __syncwarp();
    if (lane == 0) arrive(barriers.full(strip, odd));
  }
}

// The strips that a thread block makes, in this order.
struct Strips {
  struct Place {
    std::int64_t row, column;
  };
  LinearRaster raster;
  int first, step, rank, count;
  __device__ Strips(const LinearShape& shape, int first, int step)
      : raster(shape), first(first), step(step), rank(static_cast<int>(cluster_rank())) {
    count = first < raster.count() ? (raster.count() - first + step - 1) / step * LinearTile::kStrips : 0;
  }
  __device__ Place at(int s) const {
    const int2 tile = raster.at(first + s / LinearTile::kStrips * step);
    return {std::int64_t{tile.y + rank} * LinearTile::kRows + s % LinearTile::kStrips * Patch::kRows,
            std::int64_t{tile.x} * LinearTile::kColumns};
  }
};

// By a codec warp: every kCodecWarps-th strip.
template <class Config>
__device__ __forceinline__ void work_on_strips(const LinearOperands& operands, std::uint8_t* shared,
                                               const LinearBarriers& barriers, int first, int step, int codec) {
  const Strips strips(operands.shape, first, step);
  const int lane = threadIdx.x & 31;
  auto* const slots = reinterpret_cast<std::uint32_t*>(shared + Config::kSlots + codec * Config::kSlotBytes);
  typename Config::Worker worker(operands, strips, codec, slots, lane);
#pragma unroll 1
  for (int s = codec; s < strips.count; s += Config::kCodecWarps) {
    const int tile = s / LinearTile::kStrips, strip = s % LinearTile::kStrips;
    worker.work(s, shared + Config::kStrips + strip * Config::kStripBytes,
                [&] { barrier_wait(barriers.full(strip, tile & 1), (tile >> 1) & 1); });
    if (lane == 0) arrive(barriers.done(strip));
    __syncwarp();
  }
}

template <class Config>
__global__ void __cluster_dims__(LinearTile::kCluster, 1, 1) __launch_bounds__(Config::kThreads, 1)
    linear_kernel(const __grid_constant__ LinearOperands operands) {
  extern __shared__ std::uint8_t dynamic[];
  const std::uint32_t skipped = -shared_address(dynamic) & (Config::kAlignment - 1);
  std::uint8_t* const shared = dynamic + skipped;
  const std::uint32_t at = shared_address(shared);
  const LinearBarriers barriers{at + Config::kBarriers};
  if (threadIdx.x == 0) barriers.init();
  cluster_sync();

  const int group = threadIdx.x >> 7, warp = threadIdx.x >> 5;
  const int first = blockIdx.x / LinearTile::kCluster, step = gridDim.x / LinearTile::kCluster;
  if (group == 0) {
    give_registers<Config::kCopyRegisters>();
    if (warp == 0) {
      if (threadIdx.x == 0) copy_operands<Config>(operands, at, barriers, first, step);
    } else if constexpr (!Config::kManyCodecWarps) {
      work_on_strips<Config>(operands, shared, barriers, first, step, warp - 1);
    }
  } else if (group <= 2) {
    take_registers<Config::kProductRegisters>();
    multiply_tiles<Config>(operands, at, barriers, first, step, group - 1);
  } else if constexpr (Config::kManyCodecWarps) {
    give_registers<Config::kCodecRegisters>();
    work_on_strips<Config>(operands, shared, barriers, first, step, warp - 12);
  }
  __syncwarp();
  cluster_sync();  // nobody leaves while others still write to its shared memory
}

}  // namespace bitsparse::kernels
