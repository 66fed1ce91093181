"""Measurements of bitsparse; ``python -m benchmarks --help`` lists them, docs/benchmarks.md explains them."""
