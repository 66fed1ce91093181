"""The benchmarks' result files, their checks and tables, and each command in its smallest size."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import DEVICES, assert_same_bits, sparse

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not part of this source distribution", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    check,
    device_events,
    fused,
    kernel_tables,
    kernels,
    mamba,
    models,
    models_nemotron,
    models_parts,
    models_run,
    nvcomp,
    options,
    peers,
    plot,
    results,
    size,
    tables,
    timing,
)

GOOD = {
    "name": "something",
    "gpu": None,
    "cpu": {"model": "a processor", "threads": 2},
    "torch": "2.11.0",
    "cuda": None,
    "bitsparse": "0.1.0",
    "commit": "0" * 40,
    "command": "python -m benchmarks something",
    "rows": [
        {"name": "speed", "value": 0.9, "unit": "of copy", "target": 0.85, "direction": ">="},
        {"name": "waits", "value": 0, "unit": "times", "target": 0, "direction": "<="},
        {"name": "time", "value": 1.5, "unit": "ms"},
    ],
}


def changed(change):
    content = copy.deepcopy(GOOD)
    change(content)
    return content


def store(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_is_written_is_read_again(tmp_path):
    result = results.validate(GOOD)
    path = tmp_path / "new folder" / "result.json"
    results.write(path, result)
    assert results.read(path) == result
    assert json.loads(path.read_text()) == GOOD


def test_targets_that_are_met(tmp_path, capsys):
    store(tmp_path / "a.json", GOOD)
    assert check.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "all 2 targets are met (3 rows in 1 files)\n"


@pytest.mark.parametrize("row, value", [(0, 0.8499), (1, 1)])
def test_rows_that_fall_short_are_named(tmp_path, capsys, row, value):
    store(tmp_path / "good.json", GOOD)
    store(tmp_path / "bad.json", changed(lambda content: content["rows"][row].update(value=value)))
    assert check.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    others = {"speed", "waits", "time"} - {GOOD["rows"][row]["name"]}
    assert GOOD["rows"][row]["name"] in printed and not any(f" {name} " in printed for name in others)
    assert "bad.json" in printed and "good.json" not in printed
    assert "1 of 4 targets are missed (6 rows in 2 files)" in printed


@pytest.mark.parametrize("value", [0.85, 0.86])
def test_a_target_that_is_just_met(value):
    assert not results.validate(changed(lambda content: content["rows"][0].update(value=value))).short_rows


MALFORMED = {
    "not JSON": ("{", "Expecting property name"),
    "a list": ([], "result: expected an object"),
    "no name": (changed(lambda content: content.pop("name")), "name: expected a text"),
    "no commit": (changed(lambda content: content.update(commit="")), "commit: expected a text"),
    "no gpu": (changed(lambda content: content.pop("gpu")), "gpu: expected a text or null"),
    "a number as gpu": (changed(lambda content: content.update(gpu=1)), "gpu: expected a text or null"),
    "a text as cpu": (changed(lambda content: content.update(cpu="fast")), "cpu: expected an object"),
    "no threads": (changed(lambda content: content["cpu"].update(threads=0)), "cpu: threads: expected an integer"),
    "no rows": (changed(lambda content: content.update(rows=[])), "rows: expected a list of rows"),
    "a row that is none": (changed(lambda content: content["rows"].append(1)), r"rows\[3\]: expected an object"),
    "no unit": (changed(lambda content: content["rows"][2].pop("unit")), r"rows\[2\]: unit: expected a text"),
    "NaN": (changed(lambda content: content["rows"][2].update(value=math.nan)), r"\(time\): value: expected a finite"),
    "a text as value": (changed(lambda content: content["rows"][2].update(value="1")), "value: expected a finite"),
    "true as value": (changed(lambda content: content["rows"][2].update(value=True)), "value: expected a finite"),
    "target alone": (changed(lambda content: content["rows"][2].update(target=1)), "target and direction together"),
    "direction alone": (changed(lambda content: content["rows"][0].pop("target")), "target and direction together"),
    "another direction": (changed(lambda content: content["rows"][0].update(direction=">")), "one of >= and <="),
    "no number as target": (changed(lambda content: content["rows"][0].update(target=None)), "target: expected a fin"),
    "another key": (changed(lambda content: content["rows"][0].update(goal=1)), "no other keys, got .'goal'"),
    "a name twice": (changed(lambda content: content["rows"].append(GOOD["rows"][0])), "names that occur once"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_errors(tmp_path, capsys, case):
    content, message = MALFORMED[case]
    path = store(tmp_path / "a.json", content)
    with pytest.raises(results.ResultError, match=message) as error:
        results.read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert check.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_malformed_rows_are_not_written(tmp_path):
    result = results.validate(GOOD)
    result.add("broken", math.inf, "ms")
    with pytest.raises(results.ResultError, match="broken"):
        results.write(tmp_path / "a.json", result)
    assert not (tmp_path / "a.json").exists()


def test_nothing_to_check_is_an_error(tmp_path, capsys):
    assert check.main([str(tmp_path)]) == 2
    assert "no *.json in this folder" in capsys.readouterr().err
    assert check.main([str(tmp_path / "nowhere")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_tables_are_put_between_the_marks(tmp_path, capsys):
    document = tmp_path / "document.md"
    document.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    folder = tmp_path / "results"
    folder.mkdir()
    store(folder / "a.json", changed(lambda content: content["rows"][0].update(value=0.5)))
    arguments = ["--results", str(folder), "--document", str(document)]
    assert tables.main([*arguments, "--check"]) == 1
    assert tables.main(arguments) == 0
    assert tables.main([*arguments, "--check"]) == 0
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| a.json | speed | 0.5 | >= 0.85 |" in text
    assert "| speed | 0.5 ✗ | >= 0.85 | of copy |" in text
    document.write_text("no marks")
    assert tables.main(arguments) == 2


def test_documented_tables_are_those_of_the_stored_results(capsys):
    if not list((ROOT / "docs" / "results").glob("*.json")):
        pytest.skip("no stored results")
    assert tables.main(["--check"]) == 0


def test_percentiles():
    measured = timing.Timing([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (measured.median, measured.percentile(0), measured.percentile(100)) == (3.0, 1.0, 5.0)


def run_benchmark(run_python, tmp_path, name, *arguments):
    path = tmp_path / f"{name}.json"
    printed = run_python("-m", "benchmarks", name, *arguments, "--json", str(path), "--commit", "this one", cwd=ROOT)
    result = results.read(path)
    assert f"wrote {path}" in printed
    assert (result.name, result.commit) == (name, "this one")
    assert str(tmp_path) not in result.command
    exact = [row for row in result.rows if row.name.endswith("/exact")]
    assert exact and not any(row.falls_short for row in exact)
    return result


def test_cpu(run_python, tmp_path):
    result = run_benchmark(run_python, tmp_path, "cpu", "--quick", "--elements", "5000", "--densities", "0.2")
    values = result.values()
    assert values["elements"] == 5000
    assert values["bf16/density=0.2/tight/bits_per_element"] < values["bf16/density=0.2/raw/bits_per_element"] < 5
    assert values["bf16/density=0.2/raw/unpack/ms"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_arena(run_python, tmp_path, device):
    values = run_benchmark(run_python, tmp_path, "arena", "--quick", "--rounds", "1", "--device", device).values()
    assert values["warm_up/default/step1_ms"] > 0 and values["warm_up/both_steps/of_worst_case"] > 0
    assert values["warm_up/later_waits"] == 0
    assert ("host/12_live/compress/added_us" in values) == (device == "cuda")
    assert ("kernels/restore/of_contiguous" in values) == (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_products(run_python, tmp_path, device):
    arguments = ["--quick", "--rounds", "1", "--densities", "0.2", "--device", device]
    values = run_benchmark(run_python, tmp_path, "products", *arguments).values()
    name = "256x256x512/density=0.2"
    assert values[f"{name}/compress/equal"] > 0.99 and values[f"{name}/gradient/equal"] > 0.99
    assert values[f"{name}/compress/fused/ms"] > 0 and values[f"{name}/gradient/fused_of_after"] > 0


KERNELS = ["--quick", "--no-compile", "--rows", "64", "--columns", "1000", "--rounds", "1"]


@pytest.mark.parametrize("device", DEVICES)
def test_kernels(run_python, tmp_path, device):
    result = run_benchmark(run_python, tmp_path, "kernels", *KERNELS, "--device", device)
    values = result.values()
    assert values["bf16/density=0.2/kept"] == pytest.approx(0.2, abs=0.01)
    assert values["bf16/density=real/tight/bits_per_element"] < values["bf16/density=real/raw/bits_per_element"]
    for name in (
        "fp16/density=0.2/signless/restore/of_copy",
        "fp32/density=0.2/raw/gradient/of_copy",
        "relu/bf16/density=0.2/tight/compress/of_copy",
        "edge/gradient/of_aligned",
        "small/64_KiB/compress/host_us",
        "peers/density=real/eager/gradient/of_copy",
        "peers/density=0.2/bitmask/restore/of_copy",
        "general/bf16/nonzero/density=0.2/tight/pack/of_copy",
        "general/e5m2/positive/density=0.2/raw/unpack/of_copy",
    ):
        assert values[name] > 0
    if device == "cuda":
        assert values["general/e4m3fn/nonzero/density=0.2/tight/unpack_kernel/of_copy"] > 0
    assert ("small/64_KiB/compress/launches" in values) == (device == "cuda")
    assert (result.gpu is None) == (device == "cpu")
    assert not [row.name for row in result.short_rows if not row.name.startswith("size/")]
    assert len(tables.tables_of(result)) == 7
    plot.draw(result, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_chosen_kernels(run_python, tmp_path):
    values = run_benchmark(run_python, tmp_path, "kernels", "--device", "cpu", "--only", "size").values()
    assert "copy/ms" not in values and not [name for name in values if name.startswith("bf16")]
    for layer, density in {"layer0": 0.22, "layer3": 0.12, "layer6": 0.18, "layer11": 0.35}.items():
        assert values[f"size/{layer}/density"] == pytest.approx(density, abs=0.006)
        bound = values[f"size/{layer}/mask_entropy"] + density * values[f"size/{layer}/value_entropy"]
        assert values[f"size/{layer}/bound"] == pytest.approx(bound, rel=0.02)
        bits = [values[f"size/{layer}/{codec}/bits"] for codec in ("tight", "signless", "raw")]
        assert values[f"size/{layer}/bound"] < bits[0] < bits[1] < bits[2]


def test_what_kernels_are_to_reach():
    def targets(*case):
        return [fused.Case(*case).target(operation) for operation in ("compress", "restore", "gradient")]

    assert targets("bf16", 0.2) == targets("bf16", None) == [0.93, 0.90, 0.95]
    assert targets("bf16", 0.1) == [0.93, 0.88, 0.95]
    assert targets("fp16", 0.5) == [0.91, 0.88, 0.93]
    assert targets("fp32", 0.05) == targets("bf16", 0.05, "relu") == [0.88, 0.88, 0.88]


def test_the_bound():
    assert size.entropy(torch.tensor([5, 0, 5])) == 1
    assert size.entropy(torch.tensor([7])) == 0
    relu = torch.tensor([0, 0, 1, 2], dtype=torch.bfloat16)
    expected = {"density": 0.5, "mask_entropy": 1, "value_entropy": 1, "bound": 1.5}
    assert size.order_0_bound(relu) == expected


@pytest.mark.parametrize("count", [1, 8, 1001])
def test_masks_restore(count):
    x = sparse(count, density=0.3, seed=count, dtype=torch.bfloat16)
    assert_same_bits(peers.unpack_mask(*peers.pack_mask(x)), x)
    bits, values = peers.pack_bitmask(x)
    assert bits.nbytes == -(-count // 8)
    assert_same_bits(peers.unpack_bitmask(count, bits, values), x)


def test_missing_nvcomp_is_said(monkeypatch):
    monkeypatch.setattr(nvcomp, "installed", lambda: False)
    result = results.validate(changed(lambda content: content.update(name="kernels")))
    bench = kernels.Bench((8, 8), torch.device("cpu"), 1, False, result)
    peers.measure_nvcomp_cases(bench)
    assert result.values()["peers/nvcomp_installed"] == 0
    result.add("peers/density=0.2/mask/compress/ms", 1, "ms")
    (table,) = tables.tables_of(result)
    assert "nvCOMP was not installed" in table.title


def test_kernels_belong_to_their_runs():
    events = [device_events.Event(f"restore_kernel<{ms}>()", ms, ms) for ms in (9.0, 1.0, 8.0, 2.0, 3.0)]
    assert device_events.assign([None, "a", None, "b", "b"], events) == {
        "a": timing.Timing([1.0]),
        "b": timing.Timing([2.0, 3.0]),
    }
    with pytest.raises(RuntimeError, match=r"expected 1 kernels, got \['restore_kernel<9\.0>"):
        device_events.assign(["a"], events)


def test_a_part_that_fails_does_not_cost_the_others(tmp_path, capsys):
    result = results.validate(GOOD)
    with options.Reporting(result, tmp_path / "a.json") as reporting:
        with reporting.part("first"):
            raise RuntimeError("broken")
        with reporting.part("second"):
            result.add("later", 1, "ms")
    assert reporting.exit_code == 1
    assert results.read(tmp_path / "a.json").values()["later"] == 1
    assert "not complete (first)" in capsys.readouterr().err


def test_what_was_measured_before_a_signal_is_written(tmp_path, capsys):
    result = results.validate(GOOD)
    with pytest.raises(SystemExit), options.Reporting(result, tmp_path / "a.json"):
        result.add("first", 1, "ms")
        sys.exit(128 + 15)
    assert results.read(tmp_path / "a.json").values()["first"] == 1
    assert "stopped early: the result is not complete (the rest)" in capsys.readouterr().err


def test_tables_of_kernels_put_codecs_side_by_side():
    result = results.validate(changed(lambda content: content.update(name="kernels")))
    for codec, value in {"raw": 0.91, "signless": 0.9, "tight": 0.95}.items():
        for operation in ("compress", "restore", "gradient"):
            target = 0.93 if operation == "compress" else None
            result.add(f"bf16/density=0.2/{codec}/{operation}/of_copy", value, "of copy", target)
    table = kernel_tables.kernel_tables(result)[0]
    assert "| relu² | bf16 | 0.2 | – | 0.91 ✗ / 0.90 ✗ / 0.95 | 0.91 / 0.90 / 0.95 |" in table.as_markdown()


def test_turns_are_taken_in_another_order_each_round():
    order = []
    functions = {name: [lambda name=name: order.append(name)] for name in "abcd"}
    times = timing.time_in_turns(functions, torch.device("cpu"), rounds=8, warm_up=0, lead_seconds=0.1)
    rounds = [tuple(order[start : start + 4]) for start in range(0, len(order), 4)]
    assert all(sorted(names) == [*"abcd"] for names in rounds)
    assert len(set(rounds)) > 4
    assert {name: len(times[name].samples) for name in "abcd"} == dict.fromkeys("abcd", 8)


def test_a_picture_needs_a_result_that_has_one(tmp_path, capsys):
    path = store(tmp_path / "a.json", GOOD)
    assert plot.main([str(path), str(tmp_path / "a.png")]) == 2
    assert "expected a result of kernels or models, got 'something'" in capsys.readouterr().err


def test_a_picture_of_several_results(tmp_path, capsys):
    def stored(name, rows, **changes):
        result = results.validate(changed(lambda content: content.update(name="kernels", **changes)))
        for row, value in rows.items():
            result.add(row, value, "of copy")
        results.write(tmp_path / name, result)
        return tmp_path / name

    speed = {
        f"bf16/density=0.2/{codec}/{operation}/of_copy": 0.9
        for codec in ("raw", "signless", "tight")
        for operation in ("compress", "restore", "gradient")
    }
    size = {"size/layer0/bound": 3.0, **{f"size/layer0/{codec}/bits": 3.5 for codec in ("raw", "signless", "tight")}}
    files = [stored("speed.json", speed), stored("size.json", {**size, "copy/gb_per_s": 4000.0})]
    together = plot.together(files)
    assert {*speed, *size, "copy/gb_per_s"} <= {row.name for row in together.rows}
    assert len({row.name for row in together.rows}) == len(together.rows)
    for chosen in (files, files[:1]):
        assert plot.main([*map(str, chosen), str(tmp_path / "a.png")]) == 0
    other = stored("other.json", size, gpu="another")
    assert plot.main([str(files[0]), str(other), str(tmp_path / "a.png")]) == 2
    assert "other.json: expected a result of kernels on" in capsys.readouterr().err


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arguments, names", [([], "compress restore gradient"), (["--general"], "pack unpack")])
def test_profile(run_python, device, arguments, names):
    printed = run_python("-m", "benchmarks", "profile", "--quick", "--device", device, *arguments, cwd=ROOT)
    assert [line.split()[-1] for line in printed.splitlines()] == names.split()


@pytest.mark.parametrize("device", DEVICES)
def test_ffn(run_python, tmp_path, device):
    arguments = ["--device", device, "--shape", "64x16x512x2", "--densities", "0.1", "--rounds", "1", "--no-compile"]
    values = run_benchmark(run_python, tmp_path, "ffn", *arguments).values()
    prefix = "64x16x512x2/density=0.1"
    assert values[f"{prefix}/bitsparse-tight/step_ms"] > 0
    if device == "cpu":  # whole pages are coarse at this size
        assert values[f"{prefix}/bitsparse-tight/saved_of_dense"] < 0.3


@pytest.mark.parametrize("device", DEVICES)
def test_models(run_python, tmp_path, device):
    arguments = ["--quick", "--device", device, "--only", "gpt", "--tokens", "128", "256", "--no-caps", "--no-compile"]
    result = run_benchmark(run_python, tmp_path, "models", *arguments, "--steps", "2")
    values = result.values()
    assert (
        values["gpt/bitsparse/exact"] == values["gpt/checkpoint-layers/exact"] == values["gpt/dense-again/exact"] == 1
    )
    assert values["gpt/bitsparse/loss"] == values["gpt/dense/loss"] > 0
    assert values["gpt/tokens=256/bitsparse/tokens_per_s"] > 0
    assert ("gpt/bitsparse/per_token_bytes" in values) == (device == "cuda")
    steps, memory = tables.tables_of(result)
    assert len(steps.lines) == 10
    assert [(line[0], line[-1]) for line in memory.lines][-2:] == [("bitsparse", "equal"), ("bitsparse-raw", "equal")]


def test_models_that_run_out_of_time_say_so(run_python, tmp_path):
    arguments = ["--quick", "--device", "cpu", "--only", "gpt", "--minutes", "0"]
    printed = run_python("-m", "benchmarks", "models", *arguments, "--json", str(tmp_path / "a.json"), cwd=ROOT)
    assert "stopped early: the limit of 0 minutes is over" in printed
    assert results.read(tmp_path / "a.json").values() == {"stopped_early": 1}


def test_the_loss_in_chunks(monkeypatch):
    monkeypatch.setattr(models_parts, "CHUNK", 7)
    x, weight = torch.randn(20, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, (20,))
    expected = torch.nn.functional.cross_entropy(x @ weight.T, targets)
    loss = models_parts._ChunkedCrossEntropy.apply(x, weight, targets, models_parts.chunk_gradients)
    torch.testing.assert_close(loss, expected)
    for got, want in zip(
        torch.autograd.grad(2 * loss, (x, weight)), torch.autograd.grad(2 * expected, (x, weight)), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("limit, predicted", [(100, 100), (100, 90), (100, 115), (3, 3), (1, 2)])
def test_the_largest_that_fits(limit, predicted):
    found = models_run.largest_fitting(predicted, lambda count: count <= limit, 12)
    assert 0.95 * limit <= found <= limit


def test_nothing_fits():
    assert models_run.largest_fitting(5, lambda count: False, 12) is None


def test_slopes():
    assert models_run.slope([(1, 5.0), (2, 7.0), (3, 9.0)]) == pytest.approx((2, 3))


def test_mamba_in_chunks():
    torch.manual_seed(0)
    batch, length, heads, p, groups, n = 2, 24, 4, 3, 2, 5
    x, dt = torch.randn(batch, length, heads, p), torch.rand(batch, length, heads)
    b, c = torch.randn(2, batch, length, groups, n)
    a = -torch.rand(heads)
    state, outputs = torch.zeros(batch, heads, p, n), []
    for t in range(length):
        b_t, c_t = (v[:, t].repeat_interleave(heads // groups, dim=1) for v in (b, c))
        decay = (dt[:, t] * a).exp()[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * b_t[:, :, None]
        outputs.append((state * c_t[:, :, None]).sum(-1))
    got = mamba.chunked_scan(x, dt, a, b, c, chunk=8)
    torch.testing.assert_close(got, torch.stack(outputs, dim=1), atol=1e-5, rtol=1e-4)


class StandIn:
    """The parts of transformers that Nemotron-H needs, in small. Not its numbers, but its names and shapes."""

    class NemotronHConfig:
        def __init__(self, **settings):
            self.__dict__.update(settings)

    class NemotronHForCausalLM(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.base_model = torch.nn.Module()
            self.base_model.embeddings = torch.nn.Embedding(config.vocab_size, config.hidden_size)
            self.base_model.get_input_embeddings = lambda: self.base_model.embeddings
            mixers = {"M": StandIn.Mamba, "-": StandIn.MLP, "*": StandIn.Mixer}
            layers = (StandIn.Layer(mixers[kind](config), config) for kind in config.hybrid_override_pattern)
            self.base_model.layers = torch.nn.ModuleList(layers)
            self.base_model.norm_f = torch.nn.RMSNorm(config.hidden_size)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        def get_output_embeddings(self):
            return self.lm_head

    class Layer(torch.nn.Module):
        def __init__(self, mixer, config):
            super().__init__()
            self.norm, self.mixer = torch.nn.RMSNorm(config.hidden_size), mixer

        def forward(self, hidden_states, attention_mask=None):
            return hidden_states + self.mixer(self.norm(hidden_states))

    class Mixer(torch.nn.Linear):
        def __init__(self, config):
            super().__init__(config.hidden_size, config.hidden_size)

    class MLP(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.up_proj = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
            self.down_proj = torch.nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

        def forward(self, x):
            return self.down_proj(torch.square(torch.relu(self.up_proj(x))))

    class Mamba(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_heads, self.head_dim = config.mamba_num_heads, config.mamba_head_dim
            self.n_groups, self.ssm_state_size = config.n_groups, config.ssm_state_size
            self.chunk_size, self.intermediate_size = config.chunk_size, self.num_heads * self.head_dim
            mixed = self.intermediate_size + 2 * self.n_groups * self.ssm_state_size
            self.in_proj = torch.nn.Linear(config.hidden_size, self.intermediate_size + mixed + self.num_heads)
            self.conv1d = torch.nn.Conv1d(mixed, mixed, 4, groups=mixed, padding=3)
            self.act = torch.nn.functional.silu
            self.dt_bias, self.A_log, self.D = (torch.nn.Parameter(torch.ones(self.num_heads)) for _ in range(3))
            self.out_proj = torch.nn.Linear(self.intermediate_size, config.hidden_size)

        def norm(self, x, gate):
            return x * torch.sigmoid(gate)


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_mamba_some_sequences_at_a_time(batch):
    settings = {"hidden_size": 6, "mamba_num_heads": 4, "mamba_head_dim": 3, "n_groups": 2, "ssm_state_size": 5}
    torch.manual_seed(0)
    mixer = StandIn.Mamba(SimpleNamespace(**settings, chunk_size=4))
    forward = mamba.forward_of(mixer)
    x = torch.randn(batch, 8, 6)
    results = []
    for y in (forward(x), mixer.out_proj(mamba.Part(mixer)(mixer.in_proj(x)))):
        results.append([y, *torch.autograd.grad(y.square().sum(), list(mixer.parameters()))])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("mamba_layers", [True, False])
def test_nemotron(monkeypatch, tmp_path, capsys, mamba_layers):
    monkeypatch.setitem(sys.modules, "transformers", StandIn)
    part, path = "nemotron" if mamba_layers else "nemotron-no-mamba", tmp_path / "a.json"
    arguments = ["--quick", "--device", "cpu", "--only", part, "--nemotron-tokens", "256", "--rounds", "1"]
    assert models.main([*arguments, "--json", str(path), "--pattern", "M-*-"]) == 0
    values = results.read(path).values()
    assert values[f"{part}/swap/exact"] == values[f"{part}/bitsparse/exact"] == 1
    assert (f"{part}/mamba" in values) == mamba_layers
    for index, layer in enumerate(models_nemotron.real_densities(2)):
        assert values[f"{part}/density/ffn{index}"] == pytest.approx(layer, abs=0.03)


def test_missing_nemotron_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    arguments = ["--quick", "--device", "cpu", "--only", "nemotron", "--json", str(tmp_path / "a.json")]
    assert models.main(arguments) == 0
    assert "transformers has no Nemotron-H here" in capsys.readouterr().out
    assert results.read(tmp_path / "a.json").values() == {"nemotron/installed": 0}


def test_errors_and_help(run_python):
    for name in ("kernels", "cpu", "ffn", "models", "check", "tables", "plot", "profile"):
        assert f"benchmarks{'.' if name == 'check' else ' '}{name}" in run_python(
            "-m", "benchmarks", name, "--help", cwd=ROOT
        )
    command = [sys.executable, "-m", "benchmarks", "ffn", "--shape", "1x2x3"]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 2 and "expected TOKENSxWIDTHxINNERxLAYERS, got '1x2x3'" in failed.stderr
    for arguments, message in {
        ("kernels", "--device", "cpu", "--only", "bf16,all"): "expected some of bf16,",
        ("profile", "--device", "cpu", "--dtype", "e5m3"): "invalid choice: 'e5m3'",
        ("models", "--device", "cpu", "--only", "gpt,bert"): "expected some of gpt,",
    }.items():
        command = [sys.executable, "-m", "benchmarks", *arguments]
        failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert failed.returncode == 2 and message in failed.stderr
