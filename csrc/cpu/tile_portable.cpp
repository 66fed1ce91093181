// The tile codec for any processor.
#define BITSPARSE_ISA isa_portable
#include "cpu/tile_codecs_definition.h"

BITSPARSE_DEFINE_TILE_CODECS(portable_tile_codecs)
