// The strings of the public API: codec, keep, activation.
#pragma once

#include <c10/util/Exception.h>

#include <string_view>

#include "bitsparse/arena.h"
#include "bitsparse/format.h"

namespace bitsparse {

inline Codec parse_codec(std::string_view name) {
  if (name == "raw") return Codec::raw;
  if (name == "signless") return Codec::signless;
  if (name == "tight") return Codec::tight;
  TORCH_CHECK_VALUE(false, "bitsparse: expected codec to be 'raw', 'signless' or 'tight', got '", name, "'");
}

inline Keep parse_keep(std::string_view name) {
  if (name == "positive") return Keep::positive;
  if (name == "nonzero") return Keep::nonzero;
  TORCH_CHECK_VALUE(false, "bitsparse: expected keep to be 'positive' or 'nonzero', got '", name, "'");
}

inline Activation parse_activation(std::string_view name) {
  if (name == "relu") return Activation::relu;
  if (name == "relu_squared") return Activation::relu_squared;
  TORCH_CHECK_VALUE(false, "bitsparse: expected activation to be 'relu' or 'relu_squared', got '", name, "'");
}

inline const char* activation_name(Activation activation) {
  return activation == Activation::relu ? "relu" : "relu_squared";
}

}  // namespace bitsparse
