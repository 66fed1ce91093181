"""The training example in its smallest size, as the README runs it."""

import json
from pathlib import Path

import pytest
from support import DEVICES

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"


@pytest.mark.parametrize("device", DEVICES)
def test_train_gpt(run_python, tmp_path, device):
    options = ["--size", "tiny", "--steps", "6", "--probe-every", "3", "--device", device, "--out", str(tmp_path)]
    printed = run_python(str(EXAMPLE), *options)
    assert "equal to the last bit" in printed
    assert "NOT EQUAL" not in printed
    assert "train_gpt.png" in printed
    assert (tmp_path / "train_gpt.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((tmp_path / "train_gpt.json").read_text())
    rows = {row["name"]: row["value"] for row in content["rows"]}
    assert rows["losses_equal"] == rows["weights_equal"] == 1
    assert rows["dense/training_loss"] == rows["bitsparse/training_loss"]
    wide = 2 * 4 * 128 * 256 * (4 if device == "cpu" else 2)  # layers, sequences, tokens, inner width, bytes
    assert rows["dense/ffn_activations_kept"] == 2 * wide
    if device == "cpu":  # on CUDA whole pages are counted, which is coarse at this size
        assert 0 < rows["bitsparse/ffn_activations_kept"] < 0.7 * wide
    assert rows["layer_1/bits"] < 0.7 * 8 * (4 if device == "cpu" else 2)
    assert len(content["curves"]["losses"]["dense"]) == 6
    assert [probe["step"] for probe in content["curves"]["probes"]] == [1, 3, 6]


def test_text_of_ones_own(run_python, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    options = ["--size", "tiny", "--steps", "1", "--data", str(text), "--out", str(tmp_path)]
    assert "0.1 MiB of text, 1 files" in run_python(str(EXAMPLE), *options)


def test_help_and_errors(run_python):
    assert "--data FILE_OR_FOLDER" in run_python(str(EXAMPLE), "--help")
    with pytest.raises(AssertionError, match="--data: /nowhere does not exist"):
        run_python(str(EXAMPLE), "--data", "/nowhere")
    with pytest.raises(AssertionError, match="--steps: expected at least 1"):
        run_python(str(EXAMPLE), "--steps", "0")
