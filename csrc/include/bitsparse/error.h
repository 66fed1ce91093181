// Errors that callers may want to catch by type. All others are c10::Error (RuntimeError, TypeError, ValueError in
// Python).
#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace bitsparse {

// The arena had no room for a lease. The message names the bytes needed, the capacity and the setting to change.
// In Python: bitsparse.OutOfArenaMemory, a torch.OutOfMemoryError.
class OutOfArenaMemory : public c10::OutOfMemoryError {
 public:
  explicit OutOfArenaMemory(const std::string& what)
      : c10::OutOfMemoryError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)},
                              "bitsparse.OutOfArenaMemory: " + what) {}
};

}  // namespace bitsparse
