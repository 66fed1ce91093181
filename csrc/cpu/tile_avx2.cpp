// The tile codec for processors with AVX2 and BMI2.
#include "cpu/tile_codec.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

// From here on, so that what the headers above define stays runnable everywhere.
#pragma GCC target("avx2,bmi,bmi2,popcnt")
#define BITSPARSE_ISA isa_avx2
#define BITSPARSE_BMI2
#define BITSPARSE_AVX2
#include "cpu/tile_codecs_definition.h"

BITSPARSE_DEFINE_TILE_CODECS(avx2_tile_codecs)

#else

namespace bitsparse::cpu {
const TileCodecs* avx2_tile_codecs() { return nullptr; }
}  // namespace bitsparse::cpu

#endif
