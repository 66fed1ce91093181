// The CPU's arena: each lease owns a packed tensor of its exact size; the arena counts.
#pragma once

#include <memory>

#include "bitsparse/arena.h"

namespace bitsparse::cpu {

std::shared_ptr<Arena> make_arena(const ArenaOptions& options);

}  // namespace bitsparse::cpu
