"""Whole training steps (forward, backward, optimizers) of a GPT of modded-nanogpt's size, first trained on text for some
hundred steps, and of Nemotron-H's layers with random weights and real densities, with and without its Mamba layers:
dense, checkpointed (the feed-forward blocks, or whole layers), bitsparse (codec tight, unless its name says another),
and torch.compile of dense and bitsparse, the latter with fused matrix products, too.

All methods train the same weights, with the same optimizer states and batches, in the same run; step times are taken in
turns. The loss is computed in chunks, so that logits of a few thousand tokens exist at a time, by all methods. Memory is
what PyTorch's allocator has given out at most, an arena's whole capacity included; per token, its slope over tokens.
The result file is written after each configuration.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from torch import Tensor

from benchmarks import gpt, models_nemotron, results
from benchmarks.ffn_functions import dense_ffn
from benchmarks.models_run import Clock, Method, ModelBench, Stopped, Targets, Trainer, methods_of
from benchmarks.options import Reporting, add_device, chosen_device, noted_arguments, parser_of
from bitsparse.nn import CODECS

PARTS = ("gpt", "nemotron", "nemotron-no-mamba")
SLOWER = 100  # learning rates of measured steps are divided by this


@dataclass(frozen=True)
class Scale:
    """How much is done."""

    gpt: gpt.Size
    length: int  # of a sequence
    nemotron_length: int
    tokens: tuple[int, ...]
    nemotron_tokens: tuple[int, ...]
    training_steps: int
    training_tokens: int
    text_bytes: int
    rounds: int


FULL = Scale(
    gpt.NANOGPT, 512, 2048, (1024, 4096, 16384, 65536), (4096, 8192, 16384), 300, 32768, text_bytes=24 << 20, rounds=6
)
QUICK = Scale(gpt.TINY, 64, 128, (128, 256), (256, 512), 5, 256, text_bytes=1 << 18, rounds=2)


@dataclass
class Command:
    options: argparse.Namespace
    device: torch.device
    scale: Scale
    result: results.Result
    clock: Clock

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def save(self) -> None:
        if self.result.rows:
            results.write(self.options.json, self.result)

    def bench(self, name: str, trainer: Trainer, length: int, targets: Targets | None) -> ModelBench:
        with_targets = targets if self.device.type == "cuda" and not self.options.quick else None
        rounds = self.options.rounds or self.scale.rounds
        compiled = self.device.type == "cuda" if self.options.compile is None else self.options.compile
        return ModelBench(
            name=name,
            trainer=trainer,
            result=self.result,
            clock=self.clock,
            save=self.save,
            length=length,
            rounds=rounds,
            compiled=compiled,
            codecs=self.options.codecs,
            only=self.options.methods,
            targets=with_targets,
        )

    def measure(self, bench: ModelBench, tokens: Sequence[int], densities: Sequence[float]) -> None:
        parameters = sum(p.numel() for p in bench.trainer.model.parameters())
        bench.add("parameters", parameters, "weights")
        for index, density in enumerate(densities):
            bench.add(f"density/ffn{index}", density, "share of elements")
        bench.add("density/mean", sum(densities) / len(densities), "share of elements")
        tokens = sorted(n for n in tokens if n >= bench.length) or [bench.length]
        bench.check_losses(tokens[len(tokens) // 2])
        for count in tokens:
            bench.measure(count)
        bench.add_slopes()
        if self.device.type == "cuda" and self.options.caps and not self.options.no_caps:
            bench.find_caps(self.options.caps, self.options.cap_seconds)

    def gpt(self) -> None:
        scale, length = self.scale, self.options.length or self.scale.length
        tokens, words = gpt.load_tokens(self.options.data, scale.gpt.vocabulary, scale.text_bytes)
        print(f"models: gpt: {words}", flush=True)
        torch.manual_seed(0)
        model = gpt.GPT(scale.gpt, length, self.dtype).to(self.device)
        batches = text_batches(tokens, length, self.device)
        trainer = Trainer(model, model.optimizers(self.device.type == "cuda"), batches)
        bench = self.bench("gpt", trainer, length, Targets(per_token=0.67))
        steps = self.options.steps or scale.training_steps
        loss = self.train(bench, steps)
        bench.add("trained/steps", steps, "steps of training before")
        bench.add("trained/loss", loss, "nats a token at their end")
        trainer.keep(SLOWER)
        densities = model.densities(batches(scale.training_tokens, 0)[0])
        bench.compile_alike(scale.training_tokens)
        self.measure(bench, self.options.tokens or scale.tokens, densities)

    def train(self, bench: ModelBench, steps: int) -> float:
        """Compiled where possible, dense: so that densities are those of a model that has learnt something."""
        trainer, loss = bench.trainer, torch.zeros(())
        method = Method("dense", dense_ffn, compiled=bench.compiled)
        for step in range(steps):
            self.clock.check()
            batch = trainer.make_batch(self.scale.training_tokens, 1000 + step)
            try:
                loss = trainer.step(method, batch)
            except Exception as error:
                if not method.compiled:
                    raise
                print(f"models: {bench.name}: training without torch.compile, which failed: {error}", file=sys.stderr)
                method = Method("dense", dense_ffn)
                trainer.clear()
                loss = trainer.step(method, batch)
            if step % max(1, steps // 5) == 0 or step == steps - 1:
                bench.say(f"training, step {step + 1} of {steps}: loss {loss.item():.3f}")
        return loss.item()

    def nemotron(self, name: str, mamba_layers: bool) -> None:
        scale, length = self.scale, self.options.nemotron_length or self.scale.nemotron_length
        pattern = self.options.pattern if mamba_layers else self.options.pattern.replace("M", "")
        mamba = self.options.mamba or models_nemotron.fastest_mamba()
        try:
            model, equal = models_nemotron.make(pattern, mamba, self.options.quick, self.device, self.dtype)
        except models_nemotron.Missing as error:
            print(f"models: {name} is left out: transformers has no Nemotron-H here ({error})", flush=True)
            self.result.add(f"{name}/installed", 0, "1 = transformers' Nemotron-H is there")
            return
        batches = random_batches(model.embedding.num_embeddings, length, self.device)
        optimizers = models_nemotron.optimizers(model, self.device.type == "cuda")
        trainer = Trainer(model, optimizers, batches, fullgraph=False)
        # The reference path of Mamba drowns everything else.
        distorted = mamba_layers and mamba == "reference"
        bench = self.bench(name, trainer, length, None if distorted else Targets(per_token=0.70))
        bench.say(f"layers {pattern}" + (f", Mamba by {models_nemotron.MAMBA[mamba]}" if mamba_layers else ""))
        bench.add("installed", 1, "1 = transformers' Nemotron-H is there")
        bench.add("swap/exact", int(equal), "1 = with MLPs swapped, dense: Hugging Face's output to the last bit", 1)
        if mamba_layers:
            bench.add(
                "mamba", list(models_nemotron.MAMBA).index(mamba), f"0, 1 or 2; here {models_nemotron.MAMBA[mamba]}"
            )
        trainer.run(Method("dense", dense_ffn), trainer.batches(2 * length), 1)  # optimizers get their states
        trainer.keep(1)
        self.measure(
            bench, self.options.nemotron_tokens or scale.nemotron_tokens, model.densities(batches(length, 0)[0])
        )

    def run(self, part: str) -> None:
        if part == "gpt":
            self.gpt()
        else:
            self.nemotron(part, mamba_layers=part == "nemotron")


def text_batches(text: Tensor, length: int, device: torch.device) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Makes (tokens, targets) of `tokens` tokens in all, at places of the text that the seed says."""

    def make(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        count = max(1, tokens // length)
        starts = torch.randint(len(text) - length, (count,), generator=torch.Generator().manual_seed(seed))
        windows = text[starts[:, None] + torch.arange(length + 1)].to(device, torch.int64)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    return make


def random_batches(vocabulary: int, length: int, device: torch.device) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    def make(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        shape = (2, max(1, tokens // length), length)
        numbers = torch.randint(vocabulary, shape, generator=generator, device=device)
        return numbers[0], numbers[1]

    return make


def _parts(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"expected some of {','.join(PARTS)}, got {','.join(unknown)!r}")
    return [name for name in PARTS if name in names]


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped("SIGTERM")


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, torch.device]:
    parser = parser_of("models", __doc__)
    add_device(parser)
    add = parser.add_argument
    add("--only", type=_parts, default=list(PARTS), metavar="PARTS", help=f"some of {','.join(PARTS)} (default: all)")
    add("--tokens", type=int, nargs="+", help=f"of a step of gpt (default {' '.join(map(str, FULL.tokens))})")
    add("--nemotron-tokens", type=int, nargs="+", help=f"(default {' '.join(map(str, FULL.nemotron_tokens))})")
    add("--length", type=int, help=f"of a sequence of gpt (default {FULL.length})")
    add("--nemotron-length", type=int, help=f"(default {FULL.nemotron_length}; a multiple of 128)")
    add("--steps", type=int, help=f"of training before gpt is measured (default {FULL.training_steps})")
    add("--data", type=Path, metavar="FILE_OR_FOLDER", help="text to train on (default: Python's standard library)")
    add("--pattern", default=models_nemotron.PATTERN, help="layers of Nemotron-H (default %(default)s)")
    add("--mamba", choices=models_nemotron.MAMBA, help="(default: fused if mamba_ssm is installed, else chunked)")
    add("--caps", type=int, nargs="+", default=[16, 24, 48, 80], metavar="GIB", help="(default 16 24 48 80)")
    add("--cap-seconds", type=float, default=30, help="for trying caps, each part; then extrapolated (default 30)")
    add("--no-caps", action="store_true", help="leave them out")
    add("--codecs", nargs="+", choices=CODECS, default=["tight", "raw"], help="of bitsparse (default tight raw)")
    known = [method.name for method in methods_of(True, CODECS)]
    add("--methods", nargs="+", choices=known, metavar="METHOD", help=f"some of {', '.join(known)} (default all)")
    add("--compile", action=argparse.BooleanOptionalAction, help="with torch.compile (default: on a GPU)")
    add("--rounds", type=int, help=f"timed steps of each method (default {FULL.rounds}, --quick: {QUICK.rounds})")
    add("--minutes", type=float, default=6, help="stop then, and report what was measured (default 6)")
    options = parser.parse_args(arguments)
    numbers = [
        options.length,
        options.nemotron_length,
        options.rounds,
        *(options.tokens or []),
        *(options.nemotron_tokens or []),
    ]
    if any(number is not None and number < 1 for number in numbers):
        parser.error("--tokens, --length, --rounds: expected at least 1")
    if options.steps is not None and options.steps < 1:
        parser.error("--steps: expected at least 1")  # the optimizers' states come with the first
    if set(options.pattern) - set("M-*") or "-" not in options.pattern:
        parser.error("--pattern: expected M, - and *, with at least one -")
    return options, chosen_device(parser, options.device)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options, device = parse_arguments(arguments)
    if options.quick:
        torch.set_num_threads(1)  # for tensors this small more of them only wait for each other
    result = results.describe("models", str(device), noted_arguments(arguments), options.commit)
    command = Command(options, device, QUICK if options.quick else FULL, result, Clock(options.minutes))
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with Reporting(result, options.json) as reporting:
            try:
                for part in options.only:
                    with reporting.part(part):
                        command.run(part)
            except Stopped as stopped:
                print(f"models: stopped early: {stopped}", flush=True)
                result.add("stopped_early", 1, f"1 = yes: {stopped}; what is missing was not measured")
    finally:
        signal.signal(signal.SIGTERM, before)
    return reporting.exit_code


if __name__ == "__main__":
    sys.exit(main())
