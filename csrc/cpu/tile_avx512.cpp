// The tile codec for processors with AVX-512 VBMI2 (Ice Lake, Zen 4 and later).
#include "cpu/tile_codec.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

// From here on, so that what the headers above define stays runnable everywhere.
#pragma GCC target("avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi2")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false, in GCC 12's own intrinsics
#define BITSPARSE_ISA isa_avx512
#define BITSPARSE_BMI2
#define BITSPARSE_AVX512
#include "cpu/block_decode.h"
#include "cpu/block_encode.h"

namespace bitsparse::cpu {

const TileCodecs* avx512_tile_codecs() {
  using namespace isa_avx512;
  static constexpr TileCodecs codecs = {
      {plan_tile<1>, encode_tile<1>, decode_tile<1>},
      {plan_tile<2>, encode_tile<2>, decode_tile<2>},
      {plan_tile<4>, encode_tile<4>, decode_tile<4>},
  };
  return &codecs;
}

}  // namespace bitsparse::cpu

#else

namespace bitsparse::cpu {
const TileCodecs* avx512_tile_codecs() { return nullptr; }
}  // namespace bitsparse::cpu

#endif
