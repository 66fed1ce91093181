"""Finds what autograd keeps for backward, and for which module."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from bitsparse.compressed import _HEADER, _MAGIC, CompressedTensor, FormatError, _Header
from bitsparse.saved_report import Kind, SavedReport, SavedTensor, require_rich

_Key = tuple[torch.device, int]

_LOSS = "(loss)"
_HANDLE_BYTES = 16  # of a lease


class _Held:
    """What a saved variable holds in place of its tensor: gone as soon as the node is.

    The tensor is detached. It shares the memory but not the history, or a saved result and its node would keep each
    other alive.
    """

    __slots__ = ("__weakref__", "module", "sequence", "tensor")

    def __init__(self, module: str, sequence: int, tensor: Tensor) -> None:
        self.module = module
        self.sequence = sequence
        self.tensor = tensor.detach()


class _Ledger:
    """Notes every tensor that autograd saves on this thread, and the innermost module that is being called."""

    def __init__(self) -> None:
        self.calling = [""]
        self.modules: dict[str, str] = {}
        self._held: list[weakref.ref[_Held]] = []

    def saved_tensors_hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        pack = self._pack
        if "torch._dynamo" in sys.modules:  # next to compiled code, Dynamo would compile this function as well
            pack = torch.compiler.disable(pack)
        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Held:
        # Nodes are numbered on each thread, and a node is made before it saves anything: it is the last one.
        held = _Held(self.calling[-1], torch.autograd._get_sequence_nr() - 1, tensor)
        self._held.append(weakref.ref(held))
        return held

    @staticmethod
    def _unpack(held: _Held) -> Tensor:
        return held.tensor

    def held(self) -> list[_Held]:
        """Those that a node still holds: a graph that nothing leads to any more is gone, with what it had saved."""
        return [held for reference in self._held if (held := reference()) is not None]

    @contextmanager
    def attributing(self, model: torch.nn.Module) -> Iterator[None]:
        """Hooks that tell which module is being called; gone at the end."""
        self.modules[""] = type(model).__name__
        with ExitStack() as stack:
            for path, module in _observable_modules(model):
                enter, leave = self._hooks(path, type(module).__name__)
                # First of those before and last of those after, so that what other hooks compute is the module's, too.
                stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def _hooks(self, path: str, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        # A compiled function that calls the module must not take these hooks along into its code.
        def enter(*_: object) -> None:
            if not torch.compiler.is_compiling():
                self.modules.setdefault(path, name)
                self.calling.append(path)

        def leave(*_: object) -> None:
            if not torch.compiler.is_compiling():
                self.calling.pop()

        return enter, leave


def _is_compiled(module: torch.nn.Module) -> bool:
    if getattr(module, "_compiled_call_impl", None) is not None or isinstance(module, torch.jit.ScriptModule):
        return True  # the former by module.compile()
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes long; without it nothing is compiled
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _observable_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Those with hooks that run outside of compiled code. What is below a compiled module counts for it as a whole, and
    a compiled module for the one that calls it: hooks would make it compile again."""
    compiled: list[torch.nn.Module] = [module for module in model.modules() if _is_compiled(module)]
    inside = {inner for module in compiled for inner in module.modules()}
    return ((path, module) for path, module in model.named_modules() if path and module not in inside)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Of torch on CPU and CUDA, of Python, and of NumPy if it is in use."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(numpy_state)


def _put_back(attributes: dict[Any, Any], before: dict[Any, Any]) -> None:
    """In the same order, which is that of parameters() and state_dict()."""
    unchanged = list(attributes) == list(before) and all(attributes[name] is value for name, value in before.items())
    if not unchanged:
        attributes.clear()
        attributes.update(before)


def _is_registry(name: str) -> bool:
    """Of the dictionaries in which torch.nn.Module keeps what was registered."""
    return name in ("_parameters", "_buffers", "_modules") or (name.startswith("_") and "_hooks" in name)


def _tensors_that_forward_may_write(model: torch.nn.Module) -> Iterator[Tensor]:
    yield from model.buffers()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None:
            yield module.weight


def _can_be_written(tensor: Tensor) -> bool:
    if tensor.is_inference() or tensor.is_meta:
        return False
    return tensor.layout != torch.strided or tensor.is_nested or torch._debug_has_internal_overlap(tensor) != 1


@contextmanager
def _model_state_kept(model: torch.nn.Module) -> Iterator[None]:
    """Attributes of all modules, which hold flags, counters and stashed outputs, and the contents of buffers."""
    dicts: list[dict[Any, Any]] = [vars(module) for module in model.modules()]
    dicts += [value for d in dicts for name, value in d.items() if isinstance(value, dict) and _is_registry(name)]
    attributes = [(d, dict(d)) for d in dicts]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    tensors = tuple({id(t): t for t in _tensors_that_forward_may_write(model) if _can_be_written(t)}.values())
    copies = [t.detach().clone() for t in tensors]
    # The contents will be what they were, so that a graph of the caller's that has saved one of them stays valid.
    with torch.autograd._unsafe_preserve_version_counter(tensors):
        try:
            yield
        finally:
            for d, before in attributes:
                _put_back(d, before)
            for parameter, grad in gradients:
                if parameter.grad is not grad:
                    parameter.grad = grad
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that a tensor consists of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_parts(getattr(tensor, name))
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    return [part.untyped_storage() for part in _plain_parts(tensor)]


def _key(storage: torch.UntypedStorage) -> _Key:
    """The same for all tensors of one storage, as long as one of them is alive."""
    return storage.device, storage._cdata


def _owners(model: torch.nn.Module, batch: object) -> dict[_Key, Kind]:
    """Memory that is kept whether autograd saves it or not."""
    owned: dict[_Key, Kind] = {}
    groups: tuple[tuple[Kind, Iterable[object]], ...] = (
        ("parameter", model.parameters()),
        ("buffer", model.buffers()),
        ("input", tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)),
    )
    for kind, tensors in groups:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for storage in _storages(tensor.detach()):
                    owned.setdefault(_key(storage), kind)
    return owned


def _node_names(outputs: object, first: int) -> dict[int, str]:
    """Names by sequence number of the nodes that lead to the outputs, without those made before number `first`."""
    names: dict[int, str] = {}
    nodes = [t.grad_fn for t in tree_leaves(outputs) if isinstance(t, Tensor)]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or node._sequence_nr() < first:
            continue
        seen.add(node)
        names[node._sequence_nr()] = _short(node.name())
        nodes.extend(following for following, _ in node.next_functions)
    return names


def _short(name: str) -> str:
    """B for a C++ function that is called torch::autograd::CppNode<a::(anonymous namespace)::B>."""
    _, mark, function = name.partition("CppNode<")
    return function.removesuffix(">").rpartition("::")[2] if mark else name


def _as_compressed(tensor: Tensor) -> CompressedTensor | None:
    """What a block saves in place of a lease while hooks are active, as its header describes it."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.is_meta or is_traceable_wrapper_subclass(tensor):
        return None
    start = bytes(tensor[: _HEADER.size].tolist())
    if len(start) < _HEADER.size or not start.startswith(_MAGIC):
        return None
    try:
        return CompressedTensor(tensor, (_Header(*_HEADER.unpack(start)).numel,))
    except (FormatError, OverflowError):  # other data that begins like one
        return None


def _is_lease(tensor: Tensor) -> bool:
    if tensor.dtype != torch.uint8 or tuple(tensor.shape) != (_HANDLE_BYTES,) or tensor.is_meta:
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() == _HANDLE_BYTES and not storage.resizable()  # memory of an arena, not of an allocator


def _payload_bytes(compressed: CompressedTensor) -> int:
    """What memory_stats() counts for the lease of the same tensor: on CUDA the tables are apart from the payload."""
    return compressed.nbytes if compressed.device.type == "cpu" else compressed._header.payload_bytes


def _refuse_leases(held: list[_Held]) -> None:
    """In eager mode there are none under these hooks."""
    for item in held:
        if _is_lease(item.tensor):
            raise RuntimeError(
                f"model: expected the blocks of bitsparse to run eagerly, got one in compiled code that "
                f"{item.module or 'the model itself'} calls: how many bytes such a block keeps can't be told. Pass the "
                "module that was given to torch.compile (compiled._orig_mod), or call profile_saved within "
                'torch.compiler.set_stance("force_eager")'
            )


def _entries(held: list[_Held], owned: dict[_Key, Kind], nodes: dict[int, str]) -> Iterator[SavedTensor]:
    counted: dict[_Key, str] = {}  # and the module
    for item in held:
        sizes = {_key(storage): storage.nbytes() for storage in _storages(item.tensor)}
        if not any(sizes.values()):
            continue
        new = sizes.keys() - counted.keys()
        kind = next((owned[key] for key in sizes if key in owned), "saved")
        what: Tensor | CompressedTensor = item.tensor
        nbytes = dense = sum(sizes[key] for key in new)
        if kind == "saved" and (compressed := _as_compressed(item.tensor)) is not None:
            kind, what = "compressed", compressed
            nbytes, dense = (_payload_bytes(compressed), compressed.dense_nbytes) if new else (0, 0)
        yield SavedTensor(
            module=item.module,
            node=nodes.get(item.sequence),
            kind=kind,
            shape=tuple(what.shape),
            dtype=what.dtype,
            device=what.device,
            nbytes=nbytes,
            dense_nbytes=dense,
            shared_with=None if new else counted[next(iter(sizes))],
        )
        counted.update(dict.fromkeys(new, item.module))


def _check(model: object, batch: object, loss: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(batch, Tensor | tuple | Mapping):
        raise TypeError(
            f"batch: expected a tensor, a tuple of positional arguments or a dict of named ones, "
            f"got {type(batch).__name__}"
        )
    if isinstance(batch, Mapping):
        for key in batch:
            if not isinstance(key, str):
                raise TypeError(f"batch: expected the names of arguments as keys, got {key!r}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss: expected a function of the model's output, or None, got {type(loss).__name__}")
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(f"model: expected initialised parameters, got {name}, which the first forward makes")


def _call(model: torch.nn.Module, batch: object) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def profile_saved(
    model: torch.nn.Module,
    batch: Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Any] | None = None,
    print_table: bool = True,
) -> SavedReport:
    """Runs one forward pass and tells what autograd keeps for backward: which tensors, how large, for which module.

        before = bitsparse.profile_saved(dense, x)
        after = bitsparse.profile_saved(model, x)      # the same with bitsparse.nn.ReLUSquaredFFN in it
        before.compare(after)                          # both side by side, module by module

    Every tensor that a node of the graph still holds when the forward pass is over is listed. Memory is counted once,
    with the first tensor that keeps it alive: bytes of whole storages, without what an allocator rounds them up to. What
    the caller keeps anyway, parameters, buffers and what is in `batch`, is counted apart.

    Compressed activations count with their exact payload, as ``memory_stats(synchronize=True)["payload_bytes"]`` would
    for the same step, and with the dense bytes that they stand for. They do not go through an arena here: under the
    hooks that see what is saved, the blocks save a packed tensor, whose header has both sizes. So nothing is learnt
    for, or taken from, the arena of a training run, whose whole pages on CUDA take a little more (``in_use``).

    The forward pass runs with gradients enabled, under the autocast that the caller has set. No backward is run.
    Afterwards, also after an exception, these are what they were: attributes of the modules such as ``training``, their
    submodules, parameters, hooks and buffers, which tensor is a parameter's ``.grad``, and the random state of torch,
    Python and NumPy. The graph is freed, unless the model stores outputs in places other than its modules' attributes. On
    CUDA the host waits for the device at each compressed activation.

    Not seen:
        - what is kept by other means than saving: attributes of a ``torch.autograd.Function``'s context, tensors that
          Python variables hold, gradients, the work space of backward
        - what saved-tensor hooks inside of the model take over; those of activation checkpointing hold nothing, and what
          the checkpoint keeps, its inputs, is listed for the module that called it
        - which module is at work inside of compiled code: what it keeps counts for the module that calls it
        - what other threads save (``DataParallel``), and modules whose ``forward`` is called without ``__call__``
        - that the caller owns what `loss` brings along, such as targets, tensors that are plain attributes of modules, and
          what `batch` holds in containers that are not pytrees: they are counted as saved

    Not undone: what the forward pass writes to parameters (except by ``nn.Embedding(max_norm=...)``), to gradients that
    exist, to `batch`, and to lists or other objects that modules hold; hooks that it registers on tensors.

    Args:
        model: the module to call.
        batch: its argument: a tensor, a tuple of positional arguments, or a dictionary of named ones.
        loss: called with the output of `model`; what it saves is listed under "(loss)". None: the forward pass ends with
            the output.
        print_table: print the report to standard output. Needs the package rich.

    Returns:
        A SavedReport; it holds figures, no tensors.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what was expected and what came.
        ImportError: with `print_table`, when the package rich is not installed.
        RuntimeError: a block of bitsparse runs in compiled code, where the bytes that it keeps can't be told.
        Whatever `model` or `loss` raises.
    """
    _check(model, batch, loss)
    if print_table:
        require_rich("print_table")
    report = _profile(model, batch, loss)
    if print_table:
        report.print()
    return report


def _profile(model: torch.nn.Module, batch: object, loss: Callable[[Any], Any] | None) -> SavedReport:
    owned = _owners(model, batch)
    ledger = _Ledger()
    first = torch.autograd._get_sequence_nr()
    with (
        _random_state_kept(),
        _model_state_kept(model),
        ledger.attributing(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        ledger.saved_tensors_hooks(),
    ):
        outputs = [_call(model, batch)]
        if loss is not None:
            ledger.calling.append(_LOSS)
            outputs.append(loss(outputs[0]))
        held = ledger.held()
        _refuse_leases(held)
        tensors = tuple(_entries(held, owned, _node_names(outputs, first)))
    name = None if loss is None else getattr(loss, "__name__", type(loss).__name__)
    return SavedReport(tensors, ledger.modules, name)
