// Saved-tensor hooks (torch.autograd.graph.saved_tensors_hooks) and leases.
//
// A hook may move what it is given elsewhere and bring a copy back. A lease survives no copy, so under default hooks
// the blocks save a self-contained packed tensor instead, which costs one wait for the device. Hooks known to keep or
// drop the tensors themselves, such as those of activation checkpointing, get the lease.
#pragma once

#include <functional>

namespace bitsparse {

// Tells whether the innermost default hooks keep the tensors they are given. Asked only while hooks are active. Set
// once, by the Python package; without it all hooks are taken to copy.
void set_hooks_keep_tensors(std::function<bool()> keep);

// Must saved state survive being copied?
bool saved_tensors_may_be_copied();

}  // namespace bitsparse
