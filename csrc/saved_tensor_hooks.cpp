#include "bitsparse/saved_tensor_hooks.h"

#include <ATen/SavedTensorHooks.h>

namespace bitsparse {
namespace {

std::function<bool()>& hooks_keep_tensors() {
  static auto* keep = new std::function<bool()>;  // never destroyed: it may hold a Python object
  return *keep;
}

}  // namespace

void set_hooks_keep_tensors(std::function<bool()> keep) { hooks_keep_tensors() = std::move(keep); }

bool saved_tensors_may_be_copied() {
  if (!at::SavedTensorDefaultHooks::get_hooks().has_value()) return false;
  const auto& keep = hooks_keep_tensors();
  return !(keep && keep());
}

}  // namespace bitsparse
