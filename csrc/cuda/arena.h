// A CUDA device's arena: pages in device memory that kernels take and return by themselves, sized from the host without
// waiting.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "bitsparse/arena.h"

namespace bitsparse::cuda {

std::shared_ptr<Arena> make_arena(c10::Device device, const ArenaOptions& options);
c10::DeviceIndex current_device();

}  // namespace bitsparse::cuda
