"""What the feed-forward blocks of a model keep for backward, measured outside of the timed steps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpt_model import GPT
from torch import Tensor

import bitsparse


def dense_kept_bytes(model: GPT, run: Callable[[], Tensor]) -> int:
    """Bytes of the wide tensors that autograd keeps for the feed-forward blocks of a dense model in one forward.

    Wide means: as many elements as tokens times inner width. Counted by storage, so that two views of one count once.
    """
    storages: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    hooks: list[torch.autograd.graph.saved_tensors_hooks] = []
    wide = 0

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if t.numel() == wide and storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return t.detach()

    def enter(module: torch.nn.Module, inputs: tuple[Tensor]) -> None:
        nonlocal wide
        wide = inputs[0].numel() // inputs[0].shape[-1] * module.fc.out_features
        hooks.append(torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t))
        hooks[-1].__enter__()

    def leave(module: torch.nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        hooks.pop().__exit__(None, None, None)

    handles = [block.ffn.register_forward_pre_hook(enter) for block in model.blocks]
    handles += [block.ffn.register_forward_hook(leave) for block in model.blocks]
    loss = run()  # keeps the graph, and with it every storage, until the end: no address is counted for two tensors
    for handle in handles:
        handle.remove()
    del loss
    return sum(storages.values())


def bitsparse_kept_bytes(run: Callable[[], Tensor], device: torch.device) -> tuple[int, int]:
    """What one forward adds to the arena, the compressed activations of all blocks alive at the same time, and what the
    arena then holds of the device's memory; in bytes."""
    before = bitsparse.memory_stats(device, synchronize=True)["in_use"]
    loss = run()
    after = bitsparse.memory_stats(device, synchronize=True)
    del loss
    return int(after["in_use"] - before), int(after["capacity"])


@dataclass
class Probe:
    """State of the activations at one step, by layer."""

    step: int
    density: list[float]
    bits: list[float]  # per element, all headers included
    elements: int = 0  # of all layers together


@torch.no_grad()
def probe(model: GPT, run: Callable[[], Tensor], step: int, codec: str) -> Probe:
    """Density of every layer's relu(h), and its compressed size: an extra forward computes h again and compresses it as
    training does, but into a tensor of its own whose size is known exactly."""
    result = Probe(step, [], [])

    def measure(module: torch.nn.Module, inputs: tuple[Tensor]) -> None:
        h = F.linear(inputs[0], module.fc.weight, module.fc.bias)
        packed = bitsparse.compress(h, codec=codec, keep="positive")
        result.density.append(packed.density)
        result.bits.append(8 * packed.nbytes / packed.numel)
        result.elements += packed.numel

    handles = [block.ffn.register_forward_pre_hook(measure) for block in model.blocks]
    run()
    for handle in handles:
        handle.remove()
    return result
