// Included by each tile_*.cpp, after it has chosen an instruction set: defines NAME() with the codecs compiled for it.
#include "cpu/block_decode.h"
#include "cpu/block_encode.h"

#define BITSPARSE_DEFINE_TILE_CODECS(NAME) \
  namespace bitsparse::cpu {               \
  const TileCodecs* NAME() {               \
    using namespace BITSPARSE_ISA;         \
    static constexpr TileCodecs codecs = { \
        {encode_tile<1>, decode_tile<1>},  \
        {encode_tile<2>, decode_tile<2>},  \
        {encode_tile<4>, decode_tile<4>},  \
    };                                     \
    return &codecs;                        \
  }                                        \
  }
