// Everything that a LibTorch program uses.
#pragma once

#include "bitsparse/arena.h"
#include "bitsparse/build_info.h"
#include "bitsparse/compressed_tensor.h"
#include "bitsparse/error.h"
#include "bitsparse/functional.h"
#include "bitsparse/nn.h"
