"""Runs of a whole model on its sample, watched: the calls of its modules, and what their forwards set."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import Parameter, signature
from itertools import chain, count
from math import nextafter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from partition.contents import storage_of
from partition.models.as_found import Hook, as_found, tensors_of
from partition.models.flow import Flow
from partition.models.inputs import Leaves, called_with
from partition.models.runs import ArgumentKey, ModelCall, renewed
from partition.models.stand_ins import Volatile
from partition.modes import modes_kept
from partition.randomness import drawing, host_state, seed_host


def always_of(model: nn.Module, sample: Any) -> dict[str, Any]:
    """The keyword arguments that a model is called with beside its inputs.

    A model around one of transformers, peft's, hands any keyword argument on to it.
    """
    parameters = signature(model.forward).parameters
    hands_on = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    takes = "use_cache" in parameters or hands_on and any(
        "use_cache" in signature(module.forward).parameters for module in model.modules()
    )
    return {"use_cache": False} if takes and not (isinstance(sample, dict) and "use_cache" in sample) else {}


def run_model(model: nn.Module, x: Any, always: Mapping[str, Any]) -> Any:
    """The output of the model for an input."""
    args, kwargs = called_with(x, always)
    return model(*args, **kwargs)


@contextmanager
def training(*modules: nn.Module) -> Iterator[None]:
    """Within: train mode; at the end eval mode."""
    for module in modules:
        module.train()
    try:
        yield
    finally:
        for module in modules:
            module.eval()


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    with modes_kept(model.modules()):
        model.eval()
        yield


def same(one: Any, other: Any) -> bool:
    """Whether two values hold the same numbers."""
    (ours, tree), (theirs, their_tree) = tree_flatten(one), tree_flatten(other)
    return tree == their_tree and all(map(equal, ours, theirs))


def equal(one: Any, other: Any) -> bool:
    """Whether two leaves are the same numbers, or plain values. Kernels of accelerators may add in another order."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if torch.equal(one, other) or other.device.type == "cpu" or not other.is_floating_point():
            return torch.equal(one, other)
        differs = one != other  # beside what is equal, as a mask of the lowest number is, all else would be near
        return near(one[differs], other[differs], float(other[differs].detach().abs().max()))
    return type(one) is type(other) and (not isinstance(one, int | float | str) or one == other)


def near(one: Tensor, other: Tensor, largest: float) -> bool:
    """But for the order of sums, where that is the largest number in them."""
    most = 1e3 * torch.finfo(other.dtype).eps * largest
    return not other.numel() or float((one - other).detach().abs().max()) <= most


class Called(NamedTuple):
    """One call of a module.

    Attributes:
        name: of the module.
        begin, end: when, in the order of all begins and ends.
        given: what it was called with.
        returned: the leaves of what it returned, and their tree.
        entered: by (id, version) of a tensor among the leaves of its arguments, which one.
        left: the (id, version) of each leaf that it returned.
        number: of the call, in the order of all begins.
        nodes: of the flow: those of these tensors.
    """

    name: str
    begin: int
    end: int
    given: ModelCall
    returned: tuple[Leaves, TreeSpec]
    entered: dict[tuple[int, int], ArgumentKey]
    left: list[tuple[int, int]]
    number: int
    nodes: dict[ArgumentKey, int]


class Seen(NamedTuple):
    """One run of a model.

    Attributes:
        calls: of all modules, in the order in which they began.
        flow: of the values.
        output: the nodes of what is made of what the model returned.
        drawn: the times at which a module began or ended, and Python or numpy had drawn since the time before.
    """

    calls: list[Called]
    flow: Flow
    output: list[int]
    drawn: list[int]


class Watched(NamedTuple):
    """A model, and what it did on its sample.

    Attributes:
        model: the model.
        sample: what it is called with.
        always: keyword arguments beside that.
        in_eval_mode, in_train_mode: what was seen.
        volatile: the attributes that forwards set, and the parameters and buffers that they write, in either mode.
        written: the tensors of the model, and of the sample, that they write.
        hooks: that may collect what they read, by the id of a module: see `Found.hooks`.
    """

    model: nn.Module
    sample: Any
    always: Mapping[str, Any]
    in_eval_mode: Seen
    in_train_mode: Seen
    volatile: Volatile
    written: list[Tensor]
    hooks: Mapping[int, Sequence[Hook]]

    @property
    def done(self) -> list[tuple[int, str]]:
        """The flags among what is volatile."""
        return [key for key, is_done in self.volatile.items() if is_done]

    @property
    def runs(self) -> tuple[Seen, Seen]:
        """Both."""
        return self.in_eval_mode, self.in_train_mode


def watched(model: nn.Module, sample: Any, make: Callable[[Any], Any]) -> Watched:
    """Run a model on its sample, in train mode and in eval mode, and watch it; `make` chooses of what it returns."""
    always = always_of(model, sample)
    tensors = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]
    modes: list[Seen] = []
    written: set[tuple[int, str]] = set()
    flags: set[tuple[int, str]] = set()  # set to True by one of the runs: they say that something is done
    own = [tensor for module in model.modules() for tensor in tensors_of(module)]
    storages: set[int] = set()  # that are written
    with as_found([model], there=tensors) as found, training(model), torch.no_grad():

        def before_write(tensor: Tensor) -> None:
            found.contents.keep(tensor)
            storages.add(storage_of(tensor))

        for _ in range(2):
            calls: list[Called] = []
            flow = Flow(chain(model.parameters(), model.buffers(), tensors), before_write)
            drawn: list[int] = []
            with _calling(model, calls, flow, drawn) as tick, flow.watching(), _setting() as values:
                leaves = tree_leaves(make(run_model(model, sample, always)))
                tick()
            flags = {key for key, value in values.items() if value is True} - written | flags - values.keys()
            written |= values.keys()
            output = [flow.node(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            modes.append(Seen(sorted(calls, key=lambda call: call.begin), flow, output, drawn))
            for module in model.modules():
                vars(module)["training"] = False
        hooks = found.hooks()
    in_train_mode, in_eval_mode = modes
    volatile = {key: key in flags for key in written} | dict.fromkeys(_names(model, storages), False)
    written_to = [tensor for tensor in [*own, *tensors] if storage_of(tensor) in storages]
    return Watched(model, sample, always, in_eval_mode, in_train_mode, volatile, written_to, hooks)


def drawn_behind(drawn: Iterable[int], calls: Sequence[Called]) -> list[int]:
    """The times at which Python or numpy drew behind the first of some calls, and in none of them."""
    return [
        time for time in drawn
        if calls and time > calls[0].begin and not any(call.begin < time <= call.end for call in calls)
    ]  # fmt: skip


def draws_matter(seen: Watched, names: Container[str]) -> bool:
    """Whether the calls of some modules, or what the model returns, may depend on what Python and numpy draw.

    They do not where they are the same at either end of what is drawn, as for `random.random() < 0.0`, and where
    nothing is drawn but uniformly.
    """
    found = []
    for share in (0.0, nextafter(1.0, 0.0)):
        calls, drawn = list[Called](), list[int]()
        with as_found([seen.model], seen.written), training(seen.model), torch.no_grad(), drawing(share):
            seed_host(0)
            with _calling(seen.model, calls, Flow(()), drawn) as tick:
                returned = run_model(seen.model, seen.sample, seen.always)
                tick()
        calls = sorted([call for call in calls if call.name in names], key=lambda call: call.begin)
        if drawn_behind(drawn, calls):
            return True
        found.append(([call.name for call in calls], returned))
    (names_at_0, at_0), (names_at_1, at_1) = found
    return names_at_0 != names_at_1 or not same(at_0, at_1)


def _names(model: nn.Module, storages: Container[int]) -> list[tuple[int, str]]:
    """The parameters and buffers that lie in some storages: id of the module, name."""
    return [
        (id(module), name) for module in model.modules() for name, tensor in chain(
            module._parameters.items(), module._buffers.items()
        ) if tensor is not None and storage_of(tensor) in storages
    ]  # fmt: skip


@contextmanager
def _setting() -> Iterator[dict[tuple[int, str], Any]]:
    """Within: note the attributes of modules that are set, and their values."""
    own, values = nn.Module.__setattr__, dict[tuple[int, str], Any]()

    def note(module: nn.Module, name: str, value: Any) -> None:
        values[id(module), name] = value
        own(module, name, value)

    nn.Module.__setattr__ = note  # type: ignore[method-assign, assignment]
    try:
        yield values
    finally:
        nn.Module.__setattr__ = own  # type: ignore[method-assign]


@contextmanager
def _calling(
    model: nn.Module, calls: list[Called], flow: Flow, drawn: list[int]
) -> Iterator[Callable[[], int]]:
    """Within: note the calls of modules in the model, and when Python or numpy has drawn. It yields the clock."""
    numbers = count()
    state = host_state()

    def tick() -> int:
        nonlocal state
        before, state = state, host_state()
        time = flow.tick()
        if state != before:
            drawn.append(time)
        return time

    begun: list[tuple[int, int, ModelCall, dict[tuple[int, int], ArgumentKey], dict[ArgumentKey, int]]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = ModelCall(*renewed((args, kwargs)))
        tensors = {key: leaf for key, leaf in given.leaves.items() if isinstance(leaf, Tensor)}
        entered = {_state(tensors[key]): key for key in sorted(reversed(tensors), key=given.is_argument)}
        nodes = {key: flow.node(leaf) for key, leaf in tensors.items()}
        begun.append((next(numbers), tick(), given, entered, nodes))

    def after(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
            number, begin, given, entered, nodes = begun.pop()
            leaves, tree = tree_flatten(returned)
            left = [_state(leaf) for leaf in leaves]
            flow.leave(number, leaves)
            calls.append(Called(name, begin, tick(), given, (leaves, tree), entered, left, number, nodes))

        return note

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):  # these have no such hooks
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after(name), with_kwargs=True).remove)
        yield tick


def _state(value: Any) -> tuple[int, int]:
    """A tensor as it is now: what is written in place is another one."""
    return id(value), value._version if isinstance(value, Tensor) and not value.is_inference() else 0
