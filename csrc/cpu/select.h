// How the instruction set being compiled picks elements out of a block and puts them back. A mask is a string of bits,
// one for each element in lane-major order.
//   select  block -> masks, and the kept patterns in lane-major order (returns how many)
//   expand  the inverse: a block with the values where masks has bits, and zero elsewhere
#pragma once

#if defined(BITSPARSE_AVX512)
#include "cpu/select_avx512.h"
#elif defined(BITSPARSE_AVX2)
#include "cpu/select_avx2.h"
#else
#include "cpu/select_portable.h"
#endif
