"""How large an arena is in training: enough from the first step on, close to what is used, and it follows densities."""

import json
from pathlib import Path

import pytest
import torch
from small_gpt import SmallGPT, tokens

import bitsparse

LENGTH = 1024
MOST = 1.3  # capacity over payload
WARNING = "is in pinned host memory"
DENSITIES = [0.2 + 0.3 * layer / 11 for layer in range(12)]


def make_model(densities=DENSITIES, device="cuda"):
    torch.manual_seed(0)
    model = SmallGPT().to(device, torch.bfloat16)
    model.set_densities(densities)
    return model


def train(model, arena, sequences):
    with arena:
        loss = model(tokens(sequences, LENGTH, "cuda"))
    loss.backward()


def evaluate(model, arena, sequences):
    with arena, torch.no_grad():
        model(tokens(sequences, LENGTH, "cuda"))


def payload_of(model, arena, sequences):
    """Bytes that one step really needs, without what whole pages add."""
    with arena:
        loss = model(tokens(sequences, LENGTH, "cuda"))
        stats = arena.memory_stats(synchronize=True)
    del loss
    return stats["payload_bytes"]


# What a training step does, in turns, and the steps after which nothing changes any more: two of each shape.
SCHEDULES = {
    "one shape": ([[(train, 16)]], 2),
    "evaluation between steps": ([[(train, 16), (evaluate, 16), (evaluate, 3)]], 2),
    "changing batches": ([[(train, 16)], [(train, 12)], [(train, 8)]], 6),
    "growing batches": ([[(train, 8)], [(train, 12)], [(train, 16)]], 6),
    "gradient accumulation": ([[(train, 8)] * 4], 2),
    "accumulation, a short last batch, evaluation": ([[(train, 16), (train, 16), (train, 8), (evaluate, 16)]], 2),
}


@pytest.mark.cuda
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_capacity_and_waits(schedule):
    turns, settled = SCHEDULES[schedule]
    model, arena = make_model(), bitsparse.Arena("cuda")
    seen = []
    for step in range(settled + 3 * len(turns)):
        for function, sequences in turns[step % len(turns)]:
            function(model, arena, sequences)
        model.zero_grad()
        seen.append(arena.memory_stats())  # without waiting for the device
    for key in ("waits", "growths"):
        counts = [stats[key] for stats in seen]
        assert counts[-1] == counts[settled - 1], f"{key} by step: {counts}"
    largest = max(sequences for turn in turns for function, sequences in turn if function is train)
    payload = payload_of(model, arena, largest)
    ratios = [stats["capacity"] / payload for stats in seen]
    assert max(ratios[settled - 1 :]) <= MOST, f"capacity over payload by step: {ratios}"
    assert min(ratios[settled - 1 :]) >= 1, ratios
    if schedule == "one shape":  # trimmed when the second step begins
        assert ratios[1] <= MOST, ratios
    stats = arena.memory_stats(synchronize=True)
    assert [stats[key] for key in ("in_use", "failures", "live_leases")] == [0, 0, 0], stats


@pytest.mark.cuda
def test_slow_drift_is_followed(capfd):
    """Densities rise by 2 % a step, five-fold in all: no spill, no wait, and capacity stays close to what is used."""
    densities = [0.08 + 0.002 * layer for layer in range(12)]
    model, arena = make_model(densities), bitsparse.Arena("cuda")
    waits = None
    for step in range(80):
        model.set_densities([density * 1.02**step for density in densities])
        train(model, arena, 16)
        model.zero_grad()
        if step == 1:
            waits = arena.memory_stats()["waits"]
        if step % 20 == 19:
            ratio = arena.memory_stats()["capacity"] / payload_of(model, arena, 16)
            assert 1 <= ratio <= MOST, f"step {step}: {ratio}"
    stats = arena.memory_stats(synchronize=True)
    assert (stats["waits"], stats["failures"]) == (waits, 0), stats
    assert WARNING not in capfd.readouterr().err


@pytest.mark.cuda
def test_sudden_growth_is_followed_and_trim_gives_back(capfd):
    model, arena = make_model([0.1] * 12), bitsparse.Arena("cuda")
    for _ in range(4):
        train(model, arena, 16)
    small = payload_of(model, arena, 16)
    waits = arena.memory_stats(synchronize=True)["waits"]
    model.set_densities([0.4] * 12)
    train(model, arena, 16)
    torch.cuda.synchronize()
    train(model, arena, 16)
    large = payload_of(model, arena, 16)
    assert large > 1.8 * small, "no growth to speak of"
    with arena:
        loss = model(tokens(16, LENGTH, "cuda"))
        stats = arena.memory_stats(synchronize=True)
        del loss
    assert (stats["spilled"], stats["failures"], stats["waits"]) == (0, 0, waits), stats
    assert 1 <= stats["capacity"] / large <= MOST, stats
    assert capfd.readouterr().err.count(WARNING) == 1, "the step of the growth itself spills, and says so"

    # Densities fall: what the last steps used is the measure, from one trim to the next.
    model.set_densities([0.1] * 12)
    model.zero_grad()
    arena.trim()
    assert arena.memory_stats()["capacity"] >= large, "those of the large steps"
    train(model, arena, 16)
    arena.trim()
    for _ in range(3):
        train(model, arena, 16)
    stats = arena.memory_stats(synchronize=True)
    assert 1 <= stats["capacity"] / small <= MOST, stats
    assert stats["failures"] == 0
    assert WARNING not in capfd.readouterr().err


DENSE_RUNS_OUT_OF_MEMORY = """
import gc, json, sys
sys.path.insert(0, sys.argv[1])
import torch
import bitsparse
from small_gpt import SmallGPT, tokens
from support import dense_ffn

torch.manual_seed(0)
model = SmallGPT().cuda().to(torch.bfloat16)
batch = tokens(32, 1024, "cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

def step(ffn):
    model.ffn = ffn
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

def tidy():
    optimizer.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()

def runs_out_of_memory():
    try:
        step(dense_ffn)
    except torch.OutOfMemoryError:
        return True
    return False

model.ffn = dense_ffn
loss = model(batch)
loss.backward()
peak, first = torch.cuda.max_memory_allocated(), loss.item()
del loss
tidy()

cap = int(0.85 * peak)
torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
dense_fails = runs_out_of_memory()
tidy()
torch.cuda.reset_peak_memory_stats()
losses = [step(bitsparse.relu_squared_ffn) for _ in range(6)]
stats = bitsparse.memory_stats("cuda", synchronize=True)
reserved = torch.cuda.max_memory_reserved()
tidy()
print(json.dumps({
    "dense_fails": dense_fails, "dense_fails_again": runs_out_of_memory(), "first": first, "losses": losses,
    "stats": stats, "dense_peak": peak, "cap": cap, "peak": reserved,
}))
"""


@pytest.mark.cuda
def test_trains_from_the_first_step_where_dense_training_runs_out_of_memory(run_python):
    """Twelve layers under a cap of 85 % of what dense training needs; the arena has its default settings."""
    seen = json.loads(run_python("-c", DENSE_RUNS_OUT_OF_MEMORY, str(Path(__file__).parent)).splitlines()[-1])
    print(seen)
    assert seen["dense_fails"] and seen["dense_fails_again"], seen
    assert seen["losses"][0] == seen["first"], "the first loss is the dense one, to the last bit"
    assert seen["losses"][-1] < seen["losses"][0], "one batch again and again"
    assert seen["peak"] <= seen["cap"], seen
    assert [seen["stats"][key] for key in ("failures", "live_leases", "in_use")] == [0, 0, 0], seen
    assert seen["stats"]["leases_total"] == 6 * 12, seen


def test_the_densities_of_the_small_model():
    """On a CPU: that the model of these tests does what they take for granted."""
    torch.manual_seed(0)
    model = SmallGPT(layers=3, width=64, heads=2)
    wanted = [0.1, 0.3, 0.5]
    model.set_densities(wanted)
    found = []

    def ffn(x, w1, b1, w2, b2):
        found.append((torch.nn.functional.linear(x, w1, b1) > 0).float().mean().item())
        return bitsparse.relu_squared_ffn(x, w1, b1, w2, b2)

    model.ffn = ffn
    model(tokens(4, 128, "cpu")).backward()
    assert found == pytest.approx(wanted, abs=0.05)
