"""CompressedTensor as a value: attributes, devices, copies, storage, and damaged data."""

import copy
import io
import pickle
import random

import pytest
import torch
from support import CODECS, DEVICES, STORED, assert_same_bits, sparse

import bitsparse
from bitsparse import compressed


def example(device="cpu", dtype=torch.bfloat16):
    t = sparse(30, 701, density=0.25, seed=1, dtype=dtype, device=device)
    return t, bitsparse.compress(t)


def save(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("device", DEVICES)
def test_attributes(device):
    t, packed = example(device)
    assert packed.shape == t.shape
    assert isinstance(packed.shape, torch.Size)
    assert (packed.dtype, packed.device, packed.numel) == (t.dtype, t.device, t.numel())
    assert (packed.codec, packed.keep) == ("tight", "nonzero")
    assert packed.nbytes == packed.packed.numel() < packed.dense_nbytes == 2 * t.numel()
    assert packed.packed.untyped_storage().nbytes() == packed.nbytes, "nothing more is kept, or stored by torch.save"
    assert packed.density == pytest.approx(0.25, abs=0.02)
    text = repr(packed)
    for part in ("(30, 701)", "bfloat16", device, "tight", f"nbytes={packed.nbytes}"):
        assert part in text
    with pytest.raises(AttributeError):
        packed.shape = (1,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_stored_and_loaded(device, dtype, codec):
    t = sparse(5, 901, density=0.3, seed=2, dtype=dtype, device=device)
    packed = bitsparse.compress(t, codec)
    copies = [
        pickle.loads(pickle.dumps(packed)),
        torch.load(io.BytesIO(save(packed))),  # weights_only is the default
        torch.load(io.BytesIO(save({"a": [packed]})), weights_only=True)["a"][0],
        copy.copy(packed),
        copy.deepcopy(packed),
        torch.load(io.BytesIO(save(packed)), map_location="cpu"),
    ]
    for loaded in copies:
        assert (loaded.shape, loaded.dtype, loaded.codec, loaded.nbytes) == (t.shape, dtype, codec, packed.nbytes)
        assert_same_bits(loaded.decompress().cpu(), t.cpu())
    assert copies[-2].packed.data_ptr() != packed.packed.data_ptr()
    assert copies[-2].device == t.device


def test_stored_without_elements():
    for shape in [(0,), (3, 0, 2)]:
        packed = pickle.loads(pickle.dumps(bitsparse.compress(torch.empty(shape))))
        assert (packed.shape, packed.density, packed.decompress().shape) == (torch.Size(shape), 0.0, torch.Size(shape))


def test_loads_in_a_new_process(tmp_path, run_python):
    t, packed = example()
    torch.save(packed, tmp_path / "packed.pt")
    torch.save(t, tmp_path / "dense.pt")
    code = (
        "import sys, torch, bitsparse\n"
        "packed, dense = (torch.load(f'{sys.argv[1]}/{name}.pt') for name in ('packed', 'dense'))\n"
        "assert torch.equal(packed.decompress().view(torch.int16), dense.view(torch.int16))"
    )
    run_python("-c", code, str(tmp_path))


def test_moving_to_the_same_device_copies_nothing():
    _, packed = example()
    assert packed.to("cpu") is packed
    assert packed.cpu() is packed


@pytest.mark.cuda
def test_moving_between_devices():
    t, packed = example()
    there = packed.cuda()
    assert there.device == torch.device("cuda", torch.cuda.current_device())
    assert_same_bits(there.decompress(), t.cuda())
    assert_same_bits(there.to("cpu").decompress(), t)


def test_stored_by_a_later_version():
    _, packed = example()
    function, (version, *state) = packed.__reduce__()
    with pytest.raises(bitsparse.FormatError, match=f"expected stored version {version}, got {version + 1}"):
        function(version + 1, *state)


def test_stored_fields_of_the_wrong_kind():
    _, packed = example()
    function, (version, data, shape, checksum) = packed.__reduce__()
    for state in [
        (),
        (data,),
        (None, shape, checksum),
        (data.float(), shape, checksum),
        (data, "ab", checksum),
        (data, 5, 1),
    ]:
        with pytest.raises(bitsparse.FormatError):
            function(version, *state)


@pytest.mark.parametrize("change", ["data", "shape", "checksum", "length"])
def test_damage_is_found_by_the_checksum(change):
    _, packed = example()
    function, (version, data, shape, checksum) = packed.__reduce__()
    data = data.clone()
    if change == "data":
        data[len(data) // 2] ^= 1
    elif change == "shape":
        shape = shape[::-1]
    elif change == "checksum":
        checksum ^= 1
    else:
        data = data[:-16]
    with pytest.raises(bitsparse.FormatError, match=r"damaged: expected checksum \d+, got \d+"):
        function(version, data, shape, checksum)


def test_a_damaged_file_is_never_loaded_as_something_else():
    """One byte of the file changed, anywhere: it fails to load, or what it loads is what was stored."""
    t, packed = example()
    for content, load in [(pickle.dumps(packed), pickle.loads), (save(packed), lambda b: torch.load(io.BytesIO(b)))]:
        generator = random.Random(3)
        for _ in range(150):
            damaged = bytearray(content)
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
            try:
                loaded = load(bytes(damaged))
            except Exception:
                continue
            if isinstance(loaded, bitsparse.CompressedTensor):
                assert loaded.shape == t.shape
                assert_same_bits(loaded.decompress(), t)


def header_field(packed, offset, data):
    changed = packed.packed.clone()
    changed[offset : offset + len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return changed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"XXXX", r"expected the mark b'BSPT' at the start, got b'XXXX'"),
        (4, b"\x04\x00", "expected format version 3, got 4; a newer bitsparse may read it"),
        (4, b"\x02\x00", "expected format version 3, got 2$"),
        (6, b"\x09", "expected dtype below 5, got 9"),
        (7, b"\x03", "expected codec below 3, got 3"),
        (8, b"\x02", "expected keep below 2, got 2"),
        (16, b"\xff\xff", r"expected 65535 elements, got shape \(30, 701\)"),
        (24, b"\xff\xff\xff", r"expected \d+ bytes, got \d+"),
        (32, b"\x01", r"expected \d+ bytes, got \d+"),
        (40, b"\xff\xff\xff\xff\xff", r"expected at most \d+ kept elements, got \d+"),
    ],
)
def test_header_that_is_not_right(device, offset, data, message):
    t, packed = example(device)
    with pytest.raises(bitsparse.FormatError, match=message):
        bitsparse.CompressedTensor(header_field(packed, offset, data), t.shape)


def test_bytes_that_are_no_packed_tensor():
    for wrong in [torch.zeros(64), torch.zeros(8, 8, dtype=torch.uint8), torch.zeros(63, dtype=torch.uint8)]:
        with pytest.raises(bitsparse.FormatError, match="packed: expected"):
            bitsparse.CompressedTensor(wrong, (1,))
    with pytest.raises(bitsparse.FormatError, match="on meta"):
        bitsparse.CompressedTensor(torch.zeros(64, dtype=torch.uint8, device="meta"), (1,))


@pytest.mark.parametrize("device", DEVICES)
def test_decoding_damaged_bytes_never_crashes(device):
    """Past the checksum, as by somebody who means harm: unpack raises an error or gives a tensor of the right shape."""
    for dtype in STORED:
        t = sparse(9001, density=0.4, seed=4, dtype=dtype, device=device)
        packed = bitsparse.compress(t).packed
        generator = random.Random(5)
        for _ in range(120):
            damaged = packed.clone()
            for _ in range(generator.choice([1, 1, 4])):
                region = generator.choice([64, 64 + 8 * 3, 256, len(damaged)])
                damaged[generator.randrange(region)] = generator.randrange(256)
            try:
                result = torch.ops.bitsparse.unpack(damaged, list(t.shape), dtype)
            except (RuntimeError, ValueError, TypeError):
                continue
            assert (result.shape, result.dtype) == (t.shape, dtype)
        for length in range(0, len(packed), max(len(packed) // 40, 1)):
            with pytest.raises((RuntimeError, ValueError), match="bitsparse"):
                torch.ops.bitsparse.unpack(packed[:length].clone(), list(t.shape), dtype)
    if device == "cuda":
        torch.cuda.synchronize()


def test_header_fields_match_the_format():
    """The header that Python reads is 64 bytes, as in format.h, and its numbers are those that the encoder wrote."""
    assert compressed._HEADER.size == 64
    t, packed = example(dtype=torch.float16)
    header = packed._header
    assert (header.magic, header.version, header.dtype, header.block_elements) == (b"BSPT", 3, 1, 1024)
    assert (header.numel, header.kept) == (t.numel(), int((t != 0).sum()))
    assert header.reserved_0 == header.reserved_1 == 0


def test_only_plain_tensors_are_read():
    """Wrappers have no memory to read a header from."""
    from torch.testing._internal.two_tensor import TwoTensor

    t = torch.ones(6, 8)
    with pytest.raises(TypeError, match="t: expected a plain strided tensor, got TwoTensor"):
        bitsparse.compress(TwoTensor(t, t))
    with pytest.raises(TypeError, match="t: expected a plain strided tensor"):
        torch.func.functionalize(lambda q: bitsparse.compress(q).decompress())(t)
    with pytest.raises(TypeError, match="t: expected a tensor, got list"):
        bitsparse.compress([1.0])
    packed = bitsparse.compress(t).packed
    with pytest.raises(TypeError, match="packed: expected a plain strided tensor, got TwoTensor"):
        bitsparse.CompressedTensor(TwoTensor(packed, packed), (6, 8))


def test_packed_bytes_may_be_strided():
    t = torch.arange(48.0).reshape(6, 8)
    packed = bitsparse.compress(t).packed
    spread = torch.zeros(2 * packed.numel(), dtype=torch.uint8)
    spread[::2] = packed
    assert torch.equal(bitsparse.CompressedTensor(spread[::2], (6, 8)).decompress(), t)
    with pytest.raises(bitsparse.FormatError, match=r"got b'\\x00\\x00\\x00\\x00'"):
        bitsparse.CompressedTensor(torch.zeros(1, dtype=torch.uint8).expand(64), (0,))
