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
#include "cpu/tile_codecs_definition.h"

BITSPARSE_DEFINE_TILE_CODECS(avx512_tile_codecs)

#else

namespace bitsparse::cpu {
const TileCodecs* avx512_tile_codecs() { return nullptr; }
}  // namespace bitsparse::cpu

#endif
