"""Trains a ReLU² GPT on real text twice, dense and with compressed activations, side by side: same seed, same data.

Prints whether losses and weights are equal to the last bit, what the feed-forward blocks keep for backward, step times,
and density and bits per element by layer; writes a picture and a JSON file beside it.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch: GEMMs that repeat bit for bit

import torch
from gpt_model import GPT, SIZES, DenseFFN
from measure import Probe, bitsparse_kept_bytes, dense_kept_bytes, probe
from report import Result, Series, print_tables, write_json, write_picture
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from text_data import VOCABULARY, Batches, load_text
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import bitsparse

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sizes = ", ".join(f"{name} {size.layers} x {size.width}" for name, size in SIZES.items())
    parser.add_argument("--size", choices=SIZES, default="small", help=f"layers x width of the model: {sizes}")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--batch", type=int, help="sequences of a step (default: by size)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the matrix products, by autocast (default: float32, on CUDA bfloat16)"
    )
    parser.add_argument("--codec", choices=bitsparse.nn.CODECS, default="tight", help="how values are stored")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument(
        "--data", metavar="FILE_OR_FOLDER", help="text to train on (default: Python's standard library)"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile both models; bits may then differ")
    parser.add_argument(
        "--probe-every", type=int, default=20, metavar="STEPS", help="steps between two looks at density"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/train_gpt"), help="folder for the picture and the JSON file"
    )
    options = parser.parse_args()
    for name in ("steps", "probe_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    if options.batch is not None and options.batch < 1:
        parser.error("--batch: expected at least 1")
    options.device = torch.device(options.device)
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; python -m bitsparse.info says more")
    if options.dtype is None:
        options.dtype = "bfloat16" if options.device.type == "cuda" else "float32"
    return options


class Trainer:
    """One of the two models with its optimiser."""

    def __init__(self, model: GPT, options: argparse.Namespace) -> None:
        self.model = model
        self.series = Series()
        self._device = options.device
        self._dtype = DTYPES[options.dtype]
        self._forward = torch.compile(model, fullgraph=True) if options.compile else model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), fused=True)
        warm_up = max(options.steps // 10, 1)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min((step + 1) / warm_up, 1.0) * (1 - 0.9 * step / options.steps)
        )

    def _precision(self) -> AbstractContextManager[object]:
        return nullcontext() if self._dtype == torch.float32 else torch.autocast(self._device.type, self._dtype)

    def loss(self, batch: tuple[Tensor, Tensor], eager: bool = False) -> Tensor:
        with self._precision():
            return (self.model if eager else self._forward)(*batch)

    def _resident_bytes(self) -> int:
        """Allocated on the GPU by everything but the arena."""
        return torch.cuda.memory_allocated(self._device) - int(bitsparse.memory_stats(self._device)["capacity"])

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            resident = self._resident_bytes()
        start = time.perf_counter()
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step()
        if cuda:
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device) - resident
            self.series.peak_bytes = max(peak, self.series.peak_bytes or 0)
        self.series.seconds.append(time.perf_counter() - start)
        loss = loss.detach()
        self.series.losses.append(loss.item())
        return loss


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.detach().contiguous().view(torch.int32), b.detach().contiguous().view(torch.int32))


def make_trainers(options: argparse.Namespace) -> tuple[Trainer, Trainer]:
    size = SIZES[options.size]
    torch.manual_seed(options.seed)
    dense = GPT(size, VOCABULARY, DenseFFN)
    sparse = GPT(size, VOCABULARY, lambda width: bitsparse.nn.ReLUSquaredFFN(width, codec=options.codec))
    sparse.load_state_dict(dense.state_dict())
    return Trainer(dense.to(options.device), options), Trainer(sparse.to(options.device), options)


def train(options: argparse.Namespace, batches: Batches, console: Console) -> Result:
    dense, sparse = make_trainers(options)
    probes: list[Probe] = []
    losses_equal = True
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training both", total=options.steps)
        for step in range(1, options.steps + 1):
            batch = batches.next()
            if step == 1 or step % options.probe_every == 0 or step == options.steps:
                probes.append(probe(sparse.model, partial(sparse.loss, batch, eager=True), step, options.codec))
            if step == options.steps:
                dense.series.kept_bytes = dense_kept_bytes(dense.model, partial(dense.loss, batch, eager=True))
                kept = bitsparse_kept_bytes(partial(sparse.loss, batch, eager=True), options.device)
                sparse.series.kept_bytes, arena_capacity = kept
            order = (dense, sparse) if step % 2 else (sparse, dense)  # so that neither always finds the caches warm
            losses = {trainer: trainer.step(batch) for trainer in order}
            losses_equal &= same_bits(losses[dense], losses[sparse])
            mark = "=" if losses_equal else "≠"
            text = f"loss {losses[dense].item():.4f} {mark} {losses[sparse].item():.4f}"
            progress.update(task, advance=1, description=text)
            if not console.is_terminal and (step % max(options.steps // 6, 1) == 0 or step == options.steps):
                console.print(f"step {step}/{options.steps}: {text}")
    batch = batches.next("validation")
    with torch.no_grad():
        dense.series.validation, sparse.series.validation = dense.loss(batch).item(), sparse.loss(batch).item()
    pairs = zip(dense.model.parameters(), sparse.model.parameters(), strict=True)
    return Result(
        dense=dense.series,
        sparse=sparse.series,
        probes=probes,
        losses_equal=losses_equal,
        weights_equal=all(same_bits(a, b) for a, b in pairs),
        arena_capacity=arena_capacity,
        description=f"ReLU² GPT {options.size} on {options.device.type}, {options.dtype}, codec {options.codec}",
    )


def main() -> int:
    options = parse_arguments()
    console = Console()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    # On CUDA that leaves the backward of fused attention kernels free to add up in any order: matrix products don't.
    attention = sdpa_kernel(SDPBackend.MATH) if options.device.type == "cuda" else nullcontext()
    size = SIZES[options.size]
    batch = options.batch or size.batch
    text, source = load_text(options.data, least=40 * (size.length + 1))
    console.print(f"data: {source}")
    console.print(
        f"model: {size.layers} layers of width {size.width}, {batch} x {size.length} tokens a step, "
        f"{options.steps} steps, {options.dtype} on {options.device}, codec {options.codec}"
    )
    with attention:
        result = train(options, Batches(text, batch, size.length, options.seed, options.device), console)
    print_tables(console, result)
    options.out.mkdir(parents=True, exist_ok=True)
    picture, numbers = options.out / "train_gpt.png", options.out / "train_gpt.json"
    write_picture(picture, result)
    write_json(numbers, result, options.device)
    console.print(f"picture: {picture}\nnumbers: {numbers}", soft_wrap=True)
    equal = result.losses_equal and result.weights_equal
    if not equal and not options.compile:
        console.print("[red]dense and bitsparse differ: this must not happen in eager mode[/red]")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
