// The tile codec for any processor.
#define BITSPARSE_ISA isa_portable
#include "cpu/block_decode.h"
#include "cpu/block_encode.h"

namespace bitsparse::cpu {

const TileCodecs* portable_tile_codecs() {
  using namespace isa_portable;
  static constexpr TileCodecs codecs = {
      {plan_tile<1>, encode_tile<1>, decode_tile<1>},
      {plan_tile<2>, encode_tile<2>, decode_tile<2>},
      {plan_tile<4>, encode_tile<4>, decode_tile<4>},
  };
  return &codecs;
}

}  // namespace bitsparse::cpu
