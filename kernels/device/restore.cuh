// The restore kernel: a tile's blob comes into shared memory by one bulk copy, then each warp expands its block.
//
// A warp turns codes into whole values, side by side, from where each lane takes its own by its mask.
// The same kernel applies the gradient: it has the pre-activation's values at hand and multiplies in place.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bitsparse/format.h"
#include "device/blob_store.cuh"
#include "device/block_io.cuh"
#include "device/byte_moves.cuh"
#include "device/codes.cuh"
#include "device/mask.cuh"
#include "device/patch_io.cuh"
#include "device/ptx.cuh"
#include "device/scalar.cuh"
#include "device/tile.cuh"
#include "launch.h"
#include "tuning.h"

namespace bitsparse::kernels {

enum class Output { value, activation, gradient };

// Words in front of a tile's blob, of which a barrier is the first.
constexpr int kBarrierWords = 32;

template <DType D, Codec C, Keep K, Epilogue E, Output O, Geometry G = Geometry::linear>
struct RestoreConfig {
  static constexpr DType kDType = D;
  static constexpr Codec kCodec = C;
  static constexpr Epilogue kEpilogue = E;
  static constexpr Output kOutput = O;
  static constexpr bool kPatches = G == Geometry::patch;
  static constexpr int kBytes = Scalar<D>::kBytes;
  static constexpr bool kRotates = rotates_sign(C, K);
  // What decoding the masks of bytes needs in registers, the gradient's last chunk can't have.
  static constexpr int kLateChunks = kBytes == 1 ? 1 : 0;
  // Values change while they are side by side: fewer words. But for the activation of larger ones, whose squares are
  // one instruction anywhere.
  static constexpr bool kChangesEarly = kRotates || (kBytes == 1 && O == Output::activation);
  using L = BlockLayout<kBytes>;
  static constexpr int kThreads = L::kBlocksPerTile * kLanes;
  static constexpr int kStageWords = (L::kMaxTileWords + 3) / 4 * 4 + 4;  // unpack reads up to two words past the codes
  // `raw` values are read where they are, others unpacked.
  static constexpr int kScratchWords = C == Codec::raw ? 0 : L::kBlockWords + 8;
  static constexpr int kSharedBytes = 4 * (kBarrierWords + kStageWords + L::kBlocksPerTile * kScratchWords);
};

// Puts kept elements of 2 or 4 bytes in their places, one by one.
namespace detail {
// The element of mask bit `Bit` from shared address `p` on if it is kept, else zero. Predicated, not branched around.
template <int Bytes, int Bit>
__device__ __forceinline__ std::uint32_t next_element(std::uint32_t& p, std::uint32_t mask) {
  std::uint32_t x = 0;
#define BITSPARSE_POP(load)                                                                   \
  asm volatile("{.reg .pred p; .reg .b32 t; and.b32 t, %2, %3; setp.ne.u32 p, t, 0; @p " load \
               " %0, [%1]; @p add.u32 %1, %1, %4;}"                                           \
               : "+r"(x), "+r"(p)                                                             \
               : "r"(mask), "n"(1u << Bit), "n"(Bytes)                                        \
               : "memory")
  if constexpr (Bytes == 2) BITSPARSE_POP("ld.shared.u16");
  if constexpr (Bytes == 4) BITSPARSE_POP("ld.shared.u32");
#undef BITSPARSE_POP
  return x;
}

// The lane's J-th word.
template <int Bytes, int J>
__device__ __forceinline__ std::uint32_t next_word(std::uint32_t& p, std::uint32_t mask) {
  using L = BlockLayout<Bytes>;
  constexpr int e = J * (4 / Bytes);
  if constexpr (Bytes == 4) {
    return next_element<4, L::mask_bit(e)>(p, mask);
  } else {
    const std::uint32_t low = next_element<2, L::mask_bit(e)>(p, mask);
    const std::uint32_t high = next_element<2, L::mask_bit(e + 1)>(p, mask);
    return __byte_perm(low, high, 0x5410);
  }
}

template <class Config, int I, class Output>
__device__ __forceinline__ void expand_chunks(std::uint32_t& p, std::uint32_t mask, Output& output) {
  if constexpr (I < Config::L::kChunksPerLane) {
    constexpr int kBytes = Config::kBytes;
    uint4 chunk;
    chunk.x = next_word<kBytes, 4 * I>(p, mask);
    chunk.y = next_word<kBytes, 4 * I + 1>(p, mask);
    chunk.z = next_word<kBytes, 4 * I + 2>(p, mask);
    chunk.w = next_word<kBytes, 4 * I + 3>(p, mask);
    output(I, chunk);
    expand_chunks<Config, I + 1>(p, mask, output);
  }
}
}  // namespace detail

// The lane's elements, chunk by chunk, to `output`; `rank`: its first kept one's place in `values`.
template <class Config, class Output>
__device__ __forceinline__ void expand(const std::uint32_t* values, std::uint32_t rank,
                                       const LaneMask<Config::kBytes>& mask, const ByteMoves<Config::kBytes>& moves,
                                       Output& output) {
  if constexpr (Config::kBytes == 1) {
    ByteReader reader(values, rank);
#pragma unroll
    for (int i = 0; i < Config::L::kChunksPerLane; ++i) {
      std::uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const ByteMove move = moves.of(mask.of(4 * i) >> (16 * (i % 2) + 4 * j));
        x[j] = move(reader.peek());
        reader.skip(move.bits());
      }
      output(i, make_uint4(x[0], x[1], x[2], x[3]));
      __syncwarp();  // keeps the compiler from expanding several chunks at once, for which there are no registers
    }
  } else {
    std::uint32_t p = shared_address(values) + rank * Config::kBytes;
    detail::expand_chunks<Config, 0>(p, mask.words[0], output);
  }
}

// A tile's blob on its way into shared memory, in steps, so that a caller's own loads run meanwhile.
class BlobLoad {
 public:
  // `shared`: room for a barrier, then for the blob.
  __device__ __forceinline__ BlobLoad(const BlobStore& store, std::uint32_t* shared)
      : arrived_(shared_address(shared)),
        stage_(shared + kBarrierWords),
        entry_(__ldg(reinterpret_cast<const unsigned long long*>(&store.tiles[this_tile()]))) {
    if (!Target::kBulkCopy || threadIdx.x != 0) return;
    barrier_init<1>(arrived_);
    show_barriers();
  }

  // Block-wide.
  __device__ __forceinline__ void start(const BlobStore& store) const {
    if constexpr (!Target::kBulkCopy) return;
    __syncthreads();  // there is a barrier; the entry is still on its way
    if (threadIdx.x != 0) return;
    std::uint32_t units;
    const Placement from = find_blob(store, entry_, units);
    if (from.lost) return;
    barrier_expect(arrived_, units * kUnitBytes);
    bulk_load(shared_address(stage_), from.first, from.first_units * kUnitBytes, arrived_);
    if (from.first_units < units)
      bulk_load(shared_address(stage_) + from.first_units * kUnitBytes, from.second,
                (units - from.first_units) * kUnitBytes, arrived_);
  }

  // Block-wide. The blob, or null if the tile is lost.
  __device__ __forceinline__ std::uint32_t* finish(const BlobStore& store) const {
    if constexpr (Target::kBulkCopy) {
      if (is_lost(store, entry_)) return nullptr;
      barrier_wait(arrived_);
    } else {
      std::uint32_t units;
      const Placement from = find_blob(store, entry_, units);
      if (from.lost) return nullptr;
      for (std::uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
        const std::uint8_t* p =
            i < from.first_units ? from.first + i * kUnitBytes : from.second + (i - from.first_units) * kUnitBytes;
        reinterpret_cast<uint4*>(stage_)[i] = *reinterpret_cast<const uint4*>(p);
      }
      __syncthreads();
    }
    return stage_;
  }

 private:
  std::uint32_t arrived_;  // shared address
  std::uint32_t* stage_;
  std::uint64_t entry_;  // of the tile table
};

// What a lane writes of its i-th chunk, given the kept values in their places and zeros elsewhere.
template <class Config, class Writer>
struct ChunkOutput {
  Writer writer;
  const uint4* grad;

  __device__ __forceinline__ void operator()(int i, const uint4& values) {
    constexpr DType D = Config::kDType;
    std::uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (Config::kOutput == Output::activation && !Config::kChangesEarly)
        words[j] = activate<D, Config::kEpilogue>(words[j]);
      if constexpr (Config::kOutput == Output::gradient)
        words[j] =
            activation_gradient<D, Config::kEpilogue>(words[j], reinterpret_cast<const std::uint32_t*>(grad + i)[j]);
    }
    writer.write(i, words);
  }
};

// Warp-wide: a block of NaNs.
template <DType D, class Writer>
__device__ __forceinline__ void write_nan(Writer& writer) {
  constexpr std::uint32_t nan = Scalar<D>::kNaN;
  const std::uint32_t words[4] = {nan, nan, nan, nan};
#pragma unroll
  for (int i = 0; i < BlockLayout<element_bytes(D)>::kChunksPerLane; ++i) writer.write(i, words);
}

template <class Config, Access A>
__device__ __forceinline__ void restore_tile(void* data, std::int64_t numel, const BlobStore& store) {
  using L = typename Config::L;
  constexpr int kBytes = Config::kBytes;
  constexpr bool kGradient = Config::kOutput == Output::gradient;

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  std::uint32_t* const shared = dynamic_shared();
  const BlobLoad load(store, shared);
  const auto moves = ByteMoves<kBytes>::expanding(lane);
  const std::int64_t first = first_of_block<kBytes>(warp);
  using Writer = std::conditional_t<Config::kPatches, PatchChunks, ChunkWriter<kBytes, A, !kGradient>>;
  const auto writer_of_block = [&] {
    if constexpr (Config::kPatches) {
      const std::uint32_t tile_columns = store.columns / Patch::kTileColumns, row = this_tile() / tile_columns;
      const std::uint32_t column = this_tile() % tile_columns * Patch::kTileColumns + warp * Patch::kColumns;
      return Writer(data, std::int64_t{row} * Patch::kRows, column, store.columns, lane);
    } else {
      return Writer(data, first, numel, lane);
    }
  };
  uint4 grad[kGradient ? L::kChunksPerLane : 1];
  constexpr int kEarly = L::kChunksPerLane - Config::kLateChunks;
  if constexpr (kGradient && Config::kPatches) {
    const Writer chunks = writer_of_block();
#pragma unroll
    for (int i = 0; i < L::kChunksPerLane; ++i) grad[i] = chunks.load(i);
  } else if constexpr (kGradient) {
    load_chunks<kBytes, A, false, 0, kEarly>(data, first, numel, lane, grad);
  }
  load.start(store);
  std::uint32_t* const stage = load.finish(store);
  if (!stage) {  // the arena had no room for this tile: be seen
    Writer writer = writer_of_block();
    return write_nan<Config::kDType>(writer);
  }

  ChunkOutput<Config, Writer> output{writer_of_block(), grad};
  const std::uint32_t header = stage[warp];
  std::uint32_t* body = stage + L::header_offset(header);
  const MaskKind kind = L::header_kind(header);
  LaneMask<kBytes> mask = LaneMask<kBytes>::filled_with(0);
  std::uint32_t mask_words = 0;
  if (kind == MaskKind::flat) {
    mask = read_flat<kBytes>(body, lane);
    mask_words = L::kFlatMaskWords;
  } else if (may_be_two_level(Config::kCodec) && kind == MaskKind::two_level) {
    mask = read_two_level<kBytes>(body, lane, mask_words);
  } else if (kind == MaskKind::dense) {
    mask = LaneMask<kBytes>::filled_with(~0u);
  }
  const std::uint32_t lane_kept = mask.kept();
  const std::uint32_t inclusive = warp_inclusive_sum(lane_kept);
  std::uint32_t* values = body + mask_words;
  const std::uint32_t kept = __shfl_sync(~0u, inclusive, kLanes - 1);
  const auto change = [](std::uint32_t word) {
    if constexpr (Config::kRotates) word = unrotate_sign<kBytes>(word);
    if constexpr (Config::kChangesEarly) word = activate<Config::kDType, Config::kEpilogue>(word);
    return word;
  };
  if constexpr (Config::kCodec == Codec::raw) {
    if constexpr (Config::kChangesEarly) {
#pragma unroll 1
      for (std::uint32_t i = lane; 4 * i < kept; i += kLanes) values[i] = change(values[i]);
      __syncwarp();
    }
  } else {
    std::uint32_t* scratch = shared + kBarrierWords + Config::kStageWords + warp * Config::kScratchWords;
    Codes<kBytes>::unpack(values, kept, L::header_width(header), L::header_reference(header), scratch, lane, change);
    __syncwarp();
    values = scratch;
  }
  if constexpr (kGradient) load_chunks<kBytes, A, false, kEarly, L::kChunksPerLane>(data, first, numel, lane, grad);
  expand<Config>(values, inclusive - lane_kept, mask, moves, output);
}

// Out of line: rare, and not to cost the other tiles a register.
template <class Config>
__device__ __noinline__ void restore_edge_tile(void* data, std::int64_t numel, const BlobStore& store) {
  if constexpr (Config::kOutput == Output::gradient)
    if (tile_may_shift<Config::kBytes>(this_tile(), numel))
      return restore_tile<Config, Access::shifted>(data, numel, store);
  restore_tile<Config, Access::elements>(data, numel, store);  // of new tensors, which are aligned, the last tile only
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, resident_blocks(Target::kRestore, Config::kDType))
    restore_kernel(void* data, std::int64_t numel, const __grid_constant__ BlobStore store) {
  if (Config::kPatches || tile_is_whole<Config::kBytes>(reinterpret_cast<std::uintptr_t>(data), this_tile(), numel))
    restore_tile<Config, Access::whole>(data, numel, store);
  else if constexpr (!Config::kPatches)
    restore_edge_tile<Config>(data, numel, store);
}

}  // namespace bitsparse::kernels
