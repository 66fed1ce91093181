#pragma once

#include "bitsparse/arena.h"
#include "launch.h"

namespace bitsparse::cuda {

inline kernels::Epilogue epilogue_of(Activation activation) {
  return activation == Activation::relu ? kernels::Epilogue::relu : kernels::Epilogue::relu_squared;
}

}  // namespace bitsparse::cuda
