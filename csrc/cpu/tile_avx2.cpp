// The tile codec for processors with AVX2 and BMI2.
#include "cpu/tile_codec.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

// From here on, so that what the headers above define stays runnable everywhere.
#pragma GCC target("avx2,bmi,bmi2,popcnt")
#define BITSPARSE_ISA isa_avx2
#define BITSPARSE_BMI2
#include "cpu/block_decode.h"
#include "cpu/block_encode.h"

namespace bitsparse::cpu {

const TileCodecs* avx2_tile_codecs() {
  using namespace isa_avx2;
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
const TileCodecs* avx2_tile_codecs() { return nullptr; }
}  // namespace bitsparse::cpu

#endif
