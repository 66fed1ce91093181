"""bitsparse.profile_saved: exact bytes, by module, and everything as it was afterwards."""

import contextlib
import random
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from support import DEVICES, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

import bitsparse

TOKENS, D, D_FF = 32, 64, 256
FLOAT = 4
ROWS = TOKENS * D * FLOAT  # bytes of (TOKENS, D)
WIDE = TOKENS * D_FF * FLOAT
WEIGHT = D * D_FF * FLOAT  # of either layer

numpy = sys.modules.get("numpy")  # torch imports it if it is there
on_devices = pytest.mark.parametrize("device", DEVICES)


class ReLUSquared(nn.Module):
    def forward(self, x):
        return F.relu(x).square()


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(x)


def dense_mlp():
    return nn.Sequential(nn.Linear(D, D_FF), ReLUSquared(), nn.Linear(D_FF, D))


def profile(model, batch, **options):
    return bitsparse.profile_saved(model, batch, print_table=False, **options)


def tokens(device, **options):
    return randn(TOKENS, D, seed=1, dtype=torch.float32, device=device, **options)


def saved(report):
    """What the caller does not keep anyway: module, node, kind, bytes."""
    return [(t.module, t.node, t.kind, t.nbytes) for t in report.tensors if not t.kept_anyway]


@on_devices
def test_a_dense_block_by_hand(device):
    report = profile(nn.Sequential(nn.Linear(D, D_FF), nn.ReLU(), nn.Linear(D_FF, D)).to(device), tokens(device))
    assert saved(report) == [("1", "ReluBackward0", "saved", WIDE), ("2", "AddmmBackward0", "saved", 0)]
    first, second = (t for t in report.tensors if not t.kept_anyway)
    assert (first.shape, first.dtype, first.device.type) == ((TOKENS, D_FF), torch.float32, device)
    assert (first.shared_with, second.shared_with) == (None, "1")
    assert [(t.module, t.kind, t.nbytes) for t in report.tensors if t.kept_anyway] == [
        ("0", "input", ROWS),  # and not the weight: x needs no gradient
        ("2", "parameter", WEIGHT),
    ]
    total = report.total
    assert (total.tensors, total.saved, total.compressed, total.dense) == (2, WIDE, 0, WIDE)
    assert report.by_dtype()[torch.float32] == total
    assert {path: s.saved for path, s in report.by_module().items()} == {"": 0, "0": 0, "1": WIDE, "2": 0}
    assert report.modules == {"": "Sequential", "0": "Linear", "1": "ReLU", "2": "Linear"}


@on_devices
@pytest.mark.parametrize(("bias", "blob"), [(1.0, 4 * 4 + 4 * (128 + 1024)), (-1.0, 4 * 4)], ids=["full", "empty"])
def test_a_compressed_activation_by_hand(device, bias, blob):
    """One tile of BF16: four headers; then masks and a byte an element, as all are the same, or nothing."""
    ffn = bitsparse.nn.ReLUSquaredFFN(16, 64, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        ffn.fc.weight.zero_()
        ffn.fc.bias.fill_(bias)
    report = profile(ffn, randn(64, 16, seed=1, dtype=torch.bfloat16, device=device))
    payload = blob + (80 if device == "cpu" else 0)  # the packed tensor's header and table, as memory_stats has them
    (entry,) = [t for t in report.tensors if not t.kept_anyway]
    assert (entry.module, entry.node, entry.kind) == ("", "ActivationLinear", "compressed")
    assert (entry.nbytes, entry.dense_nbytes) == (payload, 64 * 64 * 2)
    assert (entry.shape, entry.dtype, entry.device.type) == ((64 * 64,), torch.bfloat16, device)
    total = report.total
    assert (total.saved, total.compressed, total.dense) == (payload, payload, 64 * 64 * 2)
    assert bitsparse.memory_stats(device)["live_leases"] == 0


@on_devices
@pytest.mark.parametrize("kind", [bitsparse.nn.ReLUSquaredFFN, bitsparse.nn.ReLUFFN])
def test_payload_and_dense_bytes_are_those_of_a_real_step(device, kind):
    model = nn.Sequential(*(Block(kind(D, 1024)) for _ in range(3))).to(device, torch.bfloat16)
    x = randn(200, D, seed=1, dtype=torch.bfloat16, device=device)
    report = profile(model, x)
    y = model(x)
    stats = bitsparse.memory_stats(device, synchronize=True)
    assert stats["live_leases"] == 3
    assert report.total.compressed == stats["payload_bytes"]
    compressed = [t for t in report.tensors if t.kind == "compressed"]
    assert sum(t.dense_nbytes for t in compressed) == stats["dense_bytes"]
    del y


@on_devices
def test_comparing_dense_with_compressed(device, capsys):
    dense = nn.Sequential(*(Block(dense_mlp()) for _ in range(2))).to(device)
    ours = nn.Sequential(*(Block(bitsparse.nn.ReLUSquaredFFN(D)) for _ in range(2))).to(device)
    for ours_block, block in zip(ours, dense, strict=True):
        bitsparse.nn.load_dense_state_dict(ours_block.mlp, block.mlp.state_dict())
    before, after = profile(dense, tokens(device)), profile(ours, tokens(device))
    comparison = before.compare(after, names=("dense", "ours"))
    rows = comparison.by_module()
    assert list(rows) == ["", "0", "0.mlp", "1", "1.mlp"]  # the layers of the dense block count for the block
    assert rows["0.mlp"][0].saved == 2 * WIDE, "relu and its square; the input is the caller's"
    assert rows["1.mlp"][0].saved == 2 * WIDE + ROWS
    payloads = [t.nbytes for t in after.tensors if t.kind == "compressed"]
    assert rows["0.mlp"][1].saved == payloads[0]
    assert rows["1.mlp"][1].saved == payloads[1] + ROWS
    assert comparison.difference == sum(payloads) - 4 * WIDE
    assert before.total.kept_anyway == after.total.kept_anyway == ROWS + 3 * WEIGHT, (
        "all but the first weight: x needs no gradient"
    )
    printed = capsys.readouterr().out
    for expected in ("dense", "ours", "1.mlp", f"{2 * WIDE + ROWS:,}", f"{comparison.difference:+,}"):
        assert expected in printed


def test_printed_table_has_exact_bytes_and_names(capsys):
    report = bitsparse.profile_saved(nn.Sequential(dense_mlp()), tokens("cpu"), loss=torch.sum)
    printed = capsys.readouterr().out
    for expected in (
        "0.1  ReLUSquared",
        "ReluBackward0",
        f"{TOKENS} × {D_FF}",
        f"{2 * WIDE:,}",
        "float32",
        "counted at",
    ):
        assert expected in printed
    assert "1 parameter" in printed and "1 input" in printed
    assert printed.strip() == str(report)
    assert repr(report) == f"SavedReport(tensors=3, saved={2 * WIDE}, kept_anyway={ROWS + WEIGHT})"


def test_names_are_no_markup():
    class Markup(nn.Module):
        def forward(self, x):
            return x.sigmoid()

    Markup.__name__ = "Markup[bold]"
    assert "0  Markup[bold]" in str(profile(nn.Sequential(Markup()), tokens("cpu").requires_grad_(), loss=torch.exp))


def test_a_module_that_is_called_twice():
    act = nn.Sigmoid()
    report = profile(nn.Sequential(act, act), tokens("cpu").requires_grad_())
    assert saved(report) == [("0", "SigmoidBackward0", "saved", ROWS)] * 2


def test_shared_parameters_count_once():
    first, second = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
    second.weight = first.weight
    report = profile(nn.Sequential(first, second), tokens("cpu").requires_grad_())
    weights = [(t.nbytes, t.shared_with) for t in report.tensors if t.kind == "parameter"]
    assert weights == [(D * D * FLOAT, None), (0, "0")]
    assert report.total.kept_anyway == ROWS + D * D * FLOAT


def test_a_slice_keeps_its_whole_storage():
    class Slice(nn.Module):
        def forward(self, x):
            return (x * 2)[:1].exp().sum() + (x * 3)[:1].sin().sum()

    report = profile(Slice(), tokens("cpu").requires_grad_())
    assert saved(report) == [("", "ExpBackward0", "saved", D * FLOAT), ("", "SinBackward0", "saved", ROWS)]


def test_what_a_dropped_graph_had_saved_is_not_kept():
    class Dropped(nn.Module):
        def forward(self, x):
            x.exp()  # nobody wants it
            return x.sigmoid()

    report = profile(Dropped(), tokens("cpu").requires_grad_())
    assert saved(report) == [("", "SigmoidBackward0", "saved", ROWS)]


def test_loss_batch_kinds_and_no_grad():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, D)
            self.register_buffer("scale", torch.ones(TOKENS, D))

        def forward(self, index, power=1):
            with torch.no_grad():
                offset = self.embed(index).sigmoid()
            return {"y": self.embed(index) * self.scale + offset * power}

    def loss(output):
        return output["y"].square().mean()

    index = torch.arange(TOKENS) % 10
    for batch in ((index, 2), {"index": index, "power": 2}):
        report = profile(Model(), batch, loss=loss)
        assert saved(report) == [("(loss)", "PowBackward0", "saved", ROWS)]
        anyway = {t.kind: (t.module, t.nbytes) for t in report.tensors if t.kept_anyway}
        assert anyway == {"input": ("embed", TOKENS * 8), "buffer": ("", ROWS)}
    assert report.loss == "loss" and "(loss) loss" in str(report)
    with torch.no_grad():
        assert profile(Model(), index, loss=loss).total.saved == ROWS
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        assert profile(nn.Sigmoid(), index.float(), loss=None).tensors == ()  # no inference tensor: nothing to save
        assert torch.is_inference_mode_enabled()
    frozen = nn.Linear(D, D).requires_grad_(False)
    assert profile(frozen, tokens("cpu")).tensors == ()
    assert str(profile(frozen, tokens("cpu")))


@on_devices
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [dense_mlp, lambda: bitsparse.nn.ReLUSquaredFFN(D)], ids=["dense", "bitsparse"])
def test_a_checkpoint_keeps_its_input_only(device, reentrant, make):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Sigmoid(), make()

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    report = profile(Checkpointed().to(device), tokens(device).requires_grad_())
    assert [(module, nbytes) for module, _, _, nbytes in saved(report)] == [("first", ROWS), ("", 0)]
    assert report.total.saved == ROWS
    assert bitsparse.memory_stats(device)["live_leases"] == 0


def test_autocast_is_the_callers():
    model = nn.Sequential(nn.Linear(D, D_FF, bias=False), nn.ReLU())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = profile(model, tokens("cpu"))
    assert report.by_dtype()[torch.bfloat16].saved == ROWS // 2 + WIDE // 2  # the cast input, and relu's result
    assert profile(model, tokens("cpu")).total.saved == WIDE


def test_a_gradient_inside_of_forward():
    class Penalty(nn.Module):
        def forward(self, x):
            (gradient,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
            self.seen = gradient.detach()
            return gradient.square().sum()

    x = tokens("cpu").requires_grad_()
    model = Penalty()
    value = []
    profile(model, x, loss=lambda y: value.append(y.detach()))
    assert torch.equal(value[0], (3 * x**2).square().sum().detach()) and not hasattr(model, "seen")


class Stateful(nn.Module):
    """Changes all that a forward pass can change, then raises if told to."""

    def __init__(self, fail):
        super().__init__()
        self.fail, self.calls, self.stash = fail, 0, None
        self.norm, self.drop, self.act = nn.BatchNorm1d(D), nn.Dropout(), nn.Sigmoid()
        self.embed = nn.Embedding(10, D, max_norm=0.1)
        self.frozen = nn.Linear(D, D).eval()
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.last = x.detach().mean()
        random.random()
        if numpy is not None:
            numpy.random.random()
        self.embed(torch.arange(10, device=x.device))
        self.stash = self.act(self.drop(self.norm(x)))
        self.added = self.stash.exp()
        self.eval()
        if self.fail:
            raise ZeroDivisionError("from forward")
        return self.frozen(self.added)


def random_states(device):
    torch_states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device == "cuda" else [])
    return (
        [t.tolist() for t in torch_states],
        random.getstate(),
        None if numpy is None else repr(numpy.random.get_state()),
    )


def hooks_of(model):
    return [
        dict(value) for m in model.modules() for name, value in vars(m).items() if name.endswith(("_hooks", "called"))
    ]


@pytest.mark.parametrize("fail", [False, True])
@on_devices
def test_everything_is_as_it_was(device, fail):
    model = Stateful(fail).to(device)
    user_hook = model.norm.register_forward_hook(lambda *_: None)
    model.norm.weight.grad = torch.full((D,), 7.0, device=device)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    versions = {name: t._version for name, t in model.state_dict(keep_vars=True).items()}
    identities = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    attributes, hooks = [dict(vars(m)) for m in model.modules()], hooks_of(model)
    generators = random_states(device)
    kept = []

    def loss(y):
        kept.append(weakref.ref(y))
        return y.sum()

    if fail:
        with pytest.raises(ZeroDivisionError, match="from forward"):
            profile(model, tokens(device), loss=loss)
    else:
        assert profile(model, tokens(device), loss=loss).total.saved > 0
        assert kept[0]() is None, "the graph is freed without the garbage collector"
    after = model.state_dict(keep_vars=True)
    assert {name: id(t) for name, t in after.items()} == identities
    assert {name: t._version for name, t in after.items()} == versions
    assert all(torch.equal(after[name], t) for name, t in state.items())
    assert [dict(vars(m)) for m in model.modules()] == attributes
    assert hooks_of(model) == hooks and len(model.norm._forward_hooks) == 1
    assert random_states(device) == generators
    assert (
        torch.equal(model.norm.weight.grad, torch.full((D,), 7.0, device=device)) and model.frozen.weight.grad is None
    )
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    user_hook.remove()


def test_an_exception_that_the_model_catches():
    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails = Fails()

        def forward(self, x):
            try:
                return self.fails(x)
            except ZeroDivisionError:
                return x.sigmoid()

    assert saved(profile(Catches(), tokens("cpu").requires_grad_()))[0][0] == ""


def test_compiled_dense_modules_count_for_the_caller():
    inner = nn.Sequential(nn.Linear(D, D_FF), nn.ReLU(), nn.Linear(D_FF, D))
    model = Block(torch.compile(inner, backend="aot_eager"))
    for _ in range(2):  # while it is compiled, and once it is
        report = profile(model, tokens("cpu"))
        assert saved(report) == [("", "CompiledFunctionBackward", "saved", WIDE)]


def test_a_compiled_function_around_modules():
    inner = nn.Sequential(nn.Linear(D, D_FF), nn.ReLU(), nn.Linear(D_FF, D))

    @torch.compile(backend="aot_eager")
    def halves(x):
        x = inner(x)
        torch._dynamo.graph_break()
        return inner(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = inner, nn.Sigmoid()

        def forward(self, x):
            return self.last(halves(x))

    x = tokens("cpu")
    for _ in range(2):
        report = profile(Model(), x)
        assert report.total.saved == 2 * WIDE + 2 * ROWS  # what comes in between, and sigmoid's result
        assert saved(report)[-1] == ("last", "SigmoidBackward0", "saved", ROWS)
        halves(x)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.mlp = Block(inner)

    def forward(self, x):
        return self.mlp(x)


def test_compiled_blocks_fail_clearly():
    ffn = torch.compile(bitsparse.nn.ReLUSquaredFFN(D), backend="aot_eager")
    with pytest.raises(
        RuntimeError, match=r"model: expected the blocks .* run eagerly, got one in compiled code that mlp"
    ):
        profile(Around(ffn), tokens("cpu"))
    with torch.compiler.set_stance("force_eager"):
        assert profile(ffn, tokens("cpu")).total.compressed > 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((len, torch.ones(1)), TypeError, "model: expected a torch.nn.Module, got builtin_function_or_method"),
        ((nn.ReLU(), [torch.ones(1)]), TypeError, "batch: expected a tensor, a tuple .* or a dict .*, got list"),
        ((nn.ReLU(), {1: torch.ones(1)}), TypeError, "batch: expected the names of arguments as keys, got 1"),
        ((nn.LazyLinear(3), torch.ones(1)), ValueError, "model: expected initialised parameters, got weight"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        profile(*arguments)


def test_errors_of_keyword_arguments():
    with pytest.raises(TypeError, match="loss: expected a function of the model's output, or None, got float"):
        profile(nn.ReLU(), torch.ones(1), loss=0.5)
    report = profile(nn.ReLU(), torch.ones(1))
    with pytest.raises(TypeError, match="other: expected a SavedReport, got int"):
        report.compare(3)
    with pytest.raises(ValueError, match=r"names: expected two strings, got \('a',\)"):
        report.compare(report, names=("a",))


def test_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    calls = []
    with pytest.raises(ImportError, match=r"print_table: expected the package rich.*python -m pip install rich"):
        bitsparse.profile_saved(nn.ReLU(), torch.ones(1), loss=calls.append)
    assert not calls, "before the work is done"
    report = profile(nn.Sigmoid(), torch.ones(1, requires_grad=True))
    assert report.total.saved == FLOAT
    with pytest.raises(ImportError, match="pip install rich"):
        report.compare(report)
    assert report.compare(report, print_table=False).difference == 0


class Rearranges(nn.Module):
    """A forward pass that changes nearly everything of its module that can be changed."""

    def __init__(self, fails):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.fails = fails

    def forward(self, x):
        first = self.first
        del self.first
        self.first = first  # now the last
        self.second.register_forward_hook(lambda *_: None)
        self.register_forward_pre_hook(lambda *_: None)
        y = self.second(first(x))
        y.sum().backward(retain_graph=True)
        if self.fails:
            raise RuntimeError("as asked")
        return y


@pytest.mark.parametrize("fails", [False, True])
def test_order_hooks_and_gradients_are_put_back(fails):
    model = Rearranges(fails)
    names, hooks = list(model.state_dict()), hooks_of(model)
    with pytest.raises(RuntimeError, match="as asked") if fails else contextlib.nullcontext():
        profile(model, tokens("cpu"))
    assert list(model.state_dict()) == names == [name for name, _ in model.named_parameters()]
    assert hooks_of(model) == hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_buffers_of_other_layouts():
    model = nn.Linear(D, D)
    model.register_buffer("csr", torch.eye(3).to_sparse_csr())
    model.register_buffer("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    model.register_buffer("jagged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
    profile(model, tokens("cpu"))
    assert torch.equal(model.csr.to_dense(), torch.eye(3))
