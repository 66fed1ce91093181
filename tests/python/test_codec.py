"""The format through its Python door: what goes in comes out, on every device, in at most the promised size."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import CODECS, DATA, DEVICES, KEEPS, STORED, assert_same_bits, bits, read_safetensors, sparse
from torch import Tensor

import bitsparse

WHOLE_DATA = DATA.parents[2] / "shared" / "data" / "relu2_preacts.safetensors"

combinations = pytest.mark.parametrize(("codec", "keep"), [(c, k) for c in CODECS for k in KEEPS])
dtypes = pytest.mark.parametrize("dtype", STORED, ids=str)


def restored(t: Tensor, keep: str) -> Tensor:
    """What decompressing must give, from the definition of the two keep modes."""
    if keep == "nonzero":
        return t.contiguous()
    values = t.float()
    return torch.where((values > 0) | values.isnan(), bits(t), torch.zeros_like(bits(t))).view(t.dtype)


def largest_size(t: Tensor) -> float:
    """Bound of the compressed size: 1% over dense, and for the last tile its headers, mask and padding."""
    return 1.01 * t.numel() * t.element_size() + 64 + 16 + 8 + 4 * 4 + 256 + 16


def check(t: Tensor, codec: str, keep: str) -> bitsparse.CompressedTensor:
    packed = bitsparse.compress(t, codec, keep)
    expected = restored(t, keep)
    assert_same_bits(packed.decompress(), expected)
    assert (packed.shape, packed.dtype, packed.codec, packed.keep) == (t.shape, t.dtype, codec, keep)
    assert packed.device == t.device
    assert packed.density == (int((bits(expected) != 0).sum()) / t.numel() if t.numel() else 0.0)
    assert packed.nbytes <= largest_size(t)
    return packed


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All bit patterns of 8- and 16-bit types; for FP32 all upper halves with several lower ones."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    if dtype.itemsize == 2:
        return upper.to(torch.int16).view(dtype)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFF], dtype=torch.int32)
    return ((upper << 16)[:, None] | lower).flatten().view(torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@combinations
@dtypes
def test_every_bit_pattern(device, dtype, codec, keep):
    """In order (blocks of like values), shuffled (blocks of all values) and thinned out (sparse blocks)."""
    patterns = bits(every_pattern(dtype))
    generator = torch.Generator().manual_seed(1)
    shuffled = patterns.repeat(8)[torch.randperm(8 * len(patterns), generator=generator)]
    thinned = torch.zeros(11 * len(patterns), dtype=patterns.dtype)
    thinned[torch.randperm(len(thinned), generator=generator)[: len(patterns)]] = patterns
    for arrangement in (patterns, shuffled, thinned):
        check(arrangement.view(dtype).to(device), codec, keep)


@pytest.mark.parametrize("device", DEVICES)
@combinations
@dtypes
def test_one_pattern_fills_blocks(device, dtype, codec, keep):
    """A block in which every kept element is the same: the narrowest codes, at every reference."""
    patterns = bits(every_pattern(dtype))
    some = patterns[:: max(len(patterns) // 256, 1)]
    blocks = some[:, None].repeat(1, 2048)
    blocks[:, 1::3] = 0
    check(blocks.view(dtype).to(device), codec, keep)


@pytest.mark.parametrize("device", DEVICES)
@combinations
@dtypes
def test_sizes_around_blocks_and_tiles(device, dtype, codec, keep):
    around = [base + offset for base in (1024, 2048, 4096, 8192, 16384) for offset in (-1, 0, 1)]
    for numel in [0, 1, 2, 3, 7, 8, 31, 32, 33, 511, 5000, *around, 100_003]:
        check(sparse(numel, density=0.3, seed=numel, dtype=dtype, device=device), codec, keep)


@pytest.mark.parametrize("device", DEVICES)
@combinations
@dtypes
def test_densities(device, dtype, codec, keep):
    """From empty to full, so that all kinds of blocks and masks occur."""
    for density in (0.0, 0.0002, 0.003, 0.02, 0.1, 0.5, 0.9, 0.97, 1.0):
        check(sparse(5, 7001, density=density, seed=3, dtype=dtype, device=device), codec, keep)


@pytest.mark.parametrize("device", DEVICES)
@combinations
@dtypes
def test_blocks_that_are_nearly_dense(device, dtype, codec, keep):
    """Around the number of kept elements from which on a block needs no mask: narrow codes and wide ones."""
    size = 2048 if dtype.itemsize == 1 else 1024
    patterns = bits(every_pattern(dtype)).flatten()
    for narrow in (True, False):
        few = torch.arange(1, 16).to(patterns.dtype) if narrow else patterns[patterns > 0][::7]
        least = size - size // (4 * dtype.itemsize if narrow else 8 * dtype.itemsize)
        counts = range(least - 12, min(least + 13, size + 1))
        blocks = few.repeat(len(counts) * size)[: len(counts) * size].view(len(counts), size).clone()
        for row, count in zip(blocks, counts, strict=True):
            row[torch.randperm(size, generator=torch.Generator().manual_seed(count))[count:]] = 0
        t = blocks.view(dtype)
        packed = check(t.to(device), codec, keep).packed
        assert torch.equal(packed.cpu(), bitsparse.compress(t, codec, keep).packed), "the CPU's bytes"


@pytest.mark.parametrize("device", DEVICES)
def test_shapes(device):
    for shape in [(), (1,), (0,), (0, 5), (5, 0, 3), (1, 1, 1, 1), (2, 3, 4, 5, 6), (1 << 12, 1)]:
        check(torch.full(shape, -1.5, dtype=torch.bfloat16, device=device), "tight", "nonzero")


@pytest.mark.parametrize("device", DEVICES)
@dtypes
def test_layouts(device, dtype):
    """Views that are not contiguous, and contiguous ones at odd addresses, mean what they mean everywhere."""
    base = sparse(60, 40, 30, density=0.4, seed=4, dtype=dtype, device=device)
    views = {
        "transposed": base.transpose(0, 2),
        "every second": base[::2, 1::3, ::2],
        "one column": base[:, :, 7],
        "expanded": base[3, 4].expand(50, 30),
        "all the same": base[0, 0, :1].expand(3000),
        "channels last": base[None].contiguous(memory_format=torch.channels_last),
    }
    flat = base.flatten()
    views |= {f"from element {start}": flat[start : start + 30_001] for start in range(1, 18)}
    for name, view in views.items():
        packed = bitsparse.compress(view)
        assert_same_bits(packed.decompress(), view.contiguous(), name)
        assert packed.decompress().is_contiguous()


def test_input_is_left_alone_and_the_result_is_new():
    t = sparse(5000, density=0.3, seed=1, dtype=torch.bfloat16).requires_grad_()
    copy = t.detach().clone()
    packed = bitsparse.compress(t)
    result = packed.decompress()
    assert not result.requires_grad
    result.fill_(7.0)
    assert_same_bits(t.detach(), copy)
    assert_same_bits(packed.decompress(), copy)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, shape, layout and density, with values from all bit patterns or from a narrow range of exponents."""
    dtype = draw(st.sampled_from(STORED))
    shape = draw(st.lists(st.integers(0, 130), min_size=0, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    full = [size * step for size, step in zip(shape, steps, strict=True)]
    offset = draw(st.integers(0, 17))
    numel = offset + int(torch.tensor([1, *full]).prod())
    kind = draw(st.sampled_from(["patterns", "normal", "narrow", "positive"]))
    if kind == "patterns":
        integers = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator)
        values = integers.to(torch.int32).view(torch.uint8).view(dtype)[:numel]
    else:
        normal = torch.randn(numel, generator=generator)
        values = {"normal": normal, "narrow": 1.0 + 0.1 * normal, "positive": normal.abs()}[kind].to(dtype)
    density = draw(st.sampled_from([0.0, 0.001, 0.03, 0.2, 0.6, 1.0]))
    dropped = torch.rand(numel, generator=generator) >= density
    values = torch.where(dropped, torch.zeros_like(bits(values)), bits(values)).view(dtype)
    view = values[offset:].reshape(full)
    view = view[tuple(slice(None, None, step) for step in steps)] if shape else view
    if draw(st.booleans()) and len(shape) > 1:
        view = view.transpose(0, -1)
    return view


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(t=tensors(), codec=st.sampled_from(CODECS), keep=st.sampled_from(KEEPS))
def test_any_tensor(device, t, codec, keep):
    view = t.to(device) if device == "cpu" else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    check(view.copy_(t) if view is not t else view, codec, keep)


@pytest.mark.parametrize("device", DEVICES)
def test_tight_is_smaller_than_signless_and_signless_than_raw(device):
    t = sparse(300_000, density=0.2, seed=5, dtype=torch.bfloat16, device=device).relu()
    raw, signless, tight = (bitsparse.compress(t, codec).nbytes for codec in CODECS)
    assert tight < signless < raw < 0.2 * t.numel() * 2 + 0.2 * t.numel()


@pytest.mark.parametrize("device", DEVICES)
def test_two_level_masks_are_used(device):
    """At a density of 0.1% a flat mask alone would take one bit an element."""
    t = sparse(1 << 20, density=0.001, seed=6, dtype=torch.bfloat16, device=device)
    assert 8 * bitsparse.compress(t).nbytes / t.numel() < 0.3


@pytest.mark.parametrize("device", DEVICES)
def test_same_bytes_every_time(device):
    t = sparse(100, 999, density=0.3, seed=7, dtype=torch.float16, device=device)
    first = bitsparse.compress(t).packed
    assert all(torch.equal(bitsparse.compress(t).packed, first) for _ in range(5))


@pytest.mark.cuda
@combinations
@dtypes
def test_cpu_and_cuda_read_each_other(dtype, codec, keep):
    t = sparse(77, 1031, density=0.3, seed=8, dtype=dtype)
    on_cpu, on_cuda = bitsparse.compress(t, codec, keep), bitsparse.compress(t.cuda(), codec, keep)
    expected = restored(t, keep)
    assert_same_bits(on_cpu.cuda().decompress(), expected.cuda())
    assert_same_bits(on_cuda.cpu().decompress(), expected)
    assert torch.equal(on_cpu.packed, on_cuda.packed.cpu()), "both encoders write the same bytes"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", [DATA / "activations.safetensors", WHOLE_DATA], ids=lambda path: path.name)
def test_activations_of_a_trained_model(device, path):
    if path == WHOLE_DATA and not path.exists():
        pytest.skip("only the slice in tests/data is here")
    tensors = read_safetensors(path)
    assert len(tensors) == 4
    for name, h in tensors.items():
        for codec in CODECS:
            packed = check(h.to(device), codec, "positive")
            assert 0.01 < packed.density < 0.5, name
            check(h.to(device), codec, "nonzero")
        bits_per_kept = (8 * packed.nbytes / packed.numel - 1) / packed.density
        assert bits_per_kept < 12.5, f"{name}: tight takes {bits_per_kept:.2f} bits per kept value"


GOLDEN = json.loads((DATA / "format_v3.json").read_text())


def from_hex(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entry", GOLDEN["entries"], ids=lambda entry: entry["name"])
def test_stored_bytes_decode_forever(device, entry):
    """Bytes that version 3 of the format wrote. When this fails, the format changed: give it a new version."""
    dtype = STORED[entry["dtype"]]
    expected = from_hex(entry["restored"]).view(dtype).to(device)
    stored = bitsparse.CompressedTensor(from_hex(entry["packed"]).to(device), expected.shape)
    assert_same_bits(stored.decompress(), expected)
    assert (stored.dtype, stored.codec, stored.keep) == (dtype, CODECS[entry["codec"]], KEEPS[entry["keep"]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entry", GOLDEN["entries"], ids=lambda entry: entry["name"])
def test_encoders_write_the_stored_bytes(device, entry):
    t = from_hex(entry["input"]).view(STORED[entry["dtype"]]).to(device)
    packed = bitsparse.compress(t, CODECS[entry["codec"]], KEEPS[entry["keep"]]).packed
    assert torch.equal(packed.cpu(), from_hex(entry["packed"]))


@pytest.mark.parametrize("numel", [100_003, (17 << 20) + 5], ids=["small", "large"])
def test_threads_and_memory_on_cpu(numel):
    """The same bytes with any number of threads, more than processors included, and no memory kept beyond them."""
    t = sparse(numel, density=0.2, seed=1, dtype=torch.bfloat16, device="cpu")
    before = torch.get_num_threads()
    try:
        for codec in CODECS:
            packed = []
            for threads in (1, 3, 16):
                torch.set_num_threads(threads)
                packed.append(bitsparse.compress(t, codec).packed)
            for each in packed:
                assert torch.equal(each, packed[0])
                assert each.untyped_storage().nbytes() == each.numel()
            assert_same_bits(bitsparse.CompressedTensor(packed[0], t.shape).decompress(), t)
    finally:
        torch.set_num_threads(before)


def test_stored_bytes_cover_the_format():
    assert GOLDEN["format_version"] == 3
    kinds = {(entry["dtype"], entry["codec"], entry["keep"]) for entry in GOLDEN["entries"]}
    assert len(kinds) == len(STORED) * len(CODECS) * len(KEEPS)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements_on_cpu():
    """Offsets that don't fit in 32 bits; one byte an element, and mostly zeros, to need 5 GiB only."""
    numel = (1 << 31) + 12_345
    if free_memory() < 8 << 30:
        pytest.skip("needs 8 GiB of free memory")
    t = torch.zeros(numel, dtype=torch.uint8)
    for start in (0, (1 << 31) - 5000, numel - 9999):
        t[start : start + 9999] = torch.arange(9999, dtype=torch.int32).to(torch.uint8)
    packed = bitsparse.compress(t.view(torch.float8_e4m3fn))
    assert packed.numel == numel
    assert torch.equal(packed.decompress().view(torch.uint8), t)


def free_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
