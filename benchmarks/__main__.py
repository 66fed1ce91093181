"""``python -m benchmarks COMMAND``: measure, check, make the tables of the documentation."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys

COMMANDS = {
    "kernels": "the kernels on a GPU against a copy, the sizes, and the same by other means",
    "cpu": "pack and unpack on the CPU against a memcpy",
    "ffn": "forward and backward of feed-forward blocks: dense, bitsparse, checkpointing, offload, torch.compile",
    "models": "whole training steps of a GPT and of Nemotron-H: dense, bitsparse, checkpointing, torch.compile",
    "products": "matrix products with the codec in their epilogue, against a kernel after them",
    "arena": "what the arena adds to kernels and host, and the cost of its warm-up",
    "check": "print the rows of result files that fall short of their target; exit code 1 if there are any",
    "tables": "write the tables of docs/benchmarks.md from docs/results",
    "plot": "draw a picture of a result of kernels",
    "profile": "run each kernel a few times, for ncu to look at",
}


def main() -> int:
    lines = "\n".join(f"  {name:<9}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"commands (each has --help):\n{lines}\n\nMeasurements print a table and write out/bench/COMMAND.json "
        "(--json PATH: elsewhere).\ndocs/benchmarks.md says what is counted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the command")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that results are written
    return importlib.import_module(f"benchmarks.{options.command}").main(options.arguments)


if __name__ == "__main__":
    sys.exit(main())
