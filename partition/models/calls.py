"""Runs of a whole model on its sample, watched: the calls of its modules, and what their forwards set."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import Parameter, signature
from itertools import chain
from math import ulp
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only

from partition.contents import storage_of, tensors_in, version_of
from partition.generators import OUTSIDE_TORCH, stand_at, states_of
from partition.models.as_found import Hook, as_found, stays, tensors_of
from partition.models.flow import Flow
from partition.models.inputs import Leaves, called_with
from partition.models.runs import ArgumentKey, CallArguments
from partition.models.stand_ins import VolatileAttributes
from partition.randomness import drawing, seed_host

# Shares of the range of what is drawn: nearly its ends, of which a forward may make no number (log(0)), and its middle.
SHARES = (ulp(0.5), 0.5, 1 - ulp(0.5))
_OF_TORCH = frozenset({*dir(nn.Module), *vars(nn.Module())})


def always_of(model: nn.Module, sample: Any) -> dict[str, Any]:
    """The keyword arguments that a model is called with beside its inputs.

    A model around one of transformers, peft's, hands any keyword argument on to it.
    """
    parameters = signature(model.forward).parameters
    forwards_kwargs = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    takes_cache = "use_cache" in parameters or forwards_kwargs and any(
        "use_cache" in signature(module.forward).parameters for module in model.modules()
    )
    return {"use_cache": False} if takes_cache and not (isinstance(sample, dict) and "use_cache" in sample) else {}


def run_model(model: nn.Module, x: Any, always: Mapping[str, Any], written: Iterable[Tensor] = ()) -> Any:
    """The output of the model for an input, which keeps its containers; of what is `written` the model has copies."""
    ids = set(map(id, written))
    args, kwargs = called_with(tree_map_only(Tensor, lambda leaf: leaf.clone() if id(leaf) in ids else leaf, x), always)
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


def same_numbers(one: Any, other: Any) -> bool:
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
        differs = one != other
        return near(one[differs], other[differs], _largest(other.detach()))
    return type(one) is type(other) and (not isinstance(one, int | float | str) or one == other)


def near(one: Tensor, other: Tensor, largest: float) -> bool:
    """But for the order of sums, where that is the largest number in them; in types of few bits to three per cent."""
    distance = float((one - other).detach().abs().max()) if other.numel() else 0.0
    return distance <= min(1e3 * torch.finfo(other.dtype).eps, 2.0**-5) * largest


def _largest(tensor: Tensor) -> float:
    """The largest number in a tensor, by magnitude. Beside that of a mask all others would be near each other.

    A mask is what is not finite, the highest or lowest number of a type, or one that stands there more than once.
    """
    numbers = tensor[tensor.abs() < torch.finfo(tensor.dtype).max / 2]
    for bound in (Tensor.min, Tensor.max):
        at_bound = numbers == bound(numbers) if numbers.numel() else numbers.bool()
        numbers = numbers[~at_bound] if int(at_bound.sum()) > 1 else numbers
    return float(numbers.abs().max()) if numbers.numel() else 0.0


class ModuleCall(NamedTuple):
    """One call of a module.

    Attributes:
        name: of the module.
        begin, end: when, in the order of all begins and ends.
        arguments: what it was called with.
        returned: the leaves of what it returned, and their tree.
        argument_keys: by (id, version) of a tensor among the leaves of its arguments, which one.
        output_states: the (id, version) of each leaf that it returned.
        nodes: of the flow: those of these tensors.
        writes: whether it wrote into one of them.
    """

    name: str
    begin: int
    end: int
    arguments: CallArguments
    returned: tuple[Leaves, TreeSpec]
    argument_keys: dict[tuple[int, int], ArgumentKey]
    output_states: list[tuple[int, int]]
    nodes: dict[ArgumentKey, int]
    writes: bool


class ModelRun(NamedTuple):
    """One run of a model.

    Attributes:
        calls: of all modules, in the order in which they began.
        flow: of the values.
        output: the nodes of what is made of what the model returned.
        draw_times: the times at which a module began or ended, and Python or numpy had drawn since the time before.
    """

    calls: list[ModuleCall]
    flow: Flow
    output: list[int]
    draw_times: list[int]

    def draws_before(self, names: Container[str]) -> bool:
        """Whether Python or numpy drew before the first call of a module that has one of these names."""
        begin = next((call.begin for call in self.calls if call.name in names), -1)
        return any(time <= begin for time in self.draw_times)


class ModelRecord(NamedTuple):
    """A model, and what it did on its sample.

    Attributes:
        model: the model.
        sample: what it is called with.
        always: keyword arguments beside that.
        in_eval_mode, in_train_mode: what was seen.
        volatile: the attributes that forwards set, and the parameters and buffers that they write, in either mode.
        written: the tensors of the model, and of the sample, that they write.
        filled: the lists, sets and dicts in attributes that they write.
        drawn: the names of the random generators in attributes from which they draw.
        hooks: that may collect what they read, by the id of a module: see `AttributeSnapshot.hooks`.
        reads: of attributes by other modules: the id of the module, the name, and the id of the one that ran.
    """

    model: nn.Module
    sample: Any
    always: Mapping[str, Any]
    in_eval_mode: ModelRun
    in_train_mode: ModelRun
    volatile: VolatileAttributes
    written: list[Tensor]
    filled: list[Any]
    drawn: list[str]
    hooks: Mapping[int, Sequence[Hook]]
    reads: set[tuple[int, str, int]]

    @property
    def runs(self) -> tuple[ModelRun, ModelRun]:
        """Both."""
        return self.in_eval_mode, self.in_train_mode


def record_model(model: nn.Module, sample: Any, make: Callable[[Any], Any]) -> ModelRecord:
    """Run a model on its sample, in train mode and in eval mode, and watch it; `make` chooses of what it returns."""
    always = always_of(model, sample)
    tensors = tensors_in(sample)
    runs: list[ModelRun] = []
    attribute_keys: set[tuple[int, str]] = set()
    flags: set[tuple[int, str]] = set()  # set to True by one of the runs: they say that something is done
    model_tensors = [tensor for module in model.modules() for tensor in tensors_of(module)]
    storages: set[int] = set()  # that are written
    reads: set[tuple[int, str, int]] = set()
    named_modules = list(model.named_modules())  # without those that a forward makes
    with as_found([model], others=tensors) as snapshot, training(model), torch.no_grad():

        def before_write(tensor: Tensor) -> None:
            snapshot.contents.keep(tensor)
            storages.add(storage_of(tensor))

        for mode in ("train", "eval"):
            calls: list[ModuleCall] = []
            flow = Flow(chain(model.parameters(), model.buffers(), tensors), before_write)
            draw_times: list[int] = []
            calling, setting = _calling(named_modules, calls, flow, draw_times, reads), _setting(storages)
            with calling as tick, flow.watching(), setting as values:
                try:
                    leaves = tree_leaves(make(run_model(model, sample, always)))
                except Exception as error:
                    error.add_note(_how_called(model, sample, always, mode))
                    raise
                tick()
            flags = {key for key, value in values.items() if value is True} - attribute_keys | flags - values.keys()
            attribute_keys |= values.keys()
            output = [flow.node(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            runs.append(ModelRun(sorted(calls, key=lambda call: call.begin), flow, output, draw_times))
            for module in model.modules():
                module.training = False  # a script keeps its own elsewhere
        hooks, filled, drawn = snapshot.hooks(), snapshot.filled(), snapshot.drawn()
    in_train_mode, in_eval_mode = runs
    volatile = {key: key in flags for key in attribute_keys} | dict.fromkeys(_names(model, storages), False)
    written = [tensor for tensor in [*model_tensors, *tensors] if storage_of(tensor) in storages]
    return ModelRecord(
        model, sample, always, in_eval_mode, in_train_mode, volatile, written, filled, drawn, hooks, reads
    )  # fmt: skip


def draws_behind(draw_times: Iterable[int], calls: Sequence[ModuleCall]) -> list[int]:
    """The times at which Python or numpy drew behind the first of some calls, and in none of them."""
    return [
        time for time in draw_times
        if calls and time > calls[0].begin and not any(call.begin < time <= call.end for call in calls)
    ]  # fmt: skip


def draws_matter(record: ModelRecord, names: Container[str]) -> bool:
    """Whether the calls of some modules, or what the model returns, may depend on what Python and numpy draw.

    They do not where they are the same at either end of what is drawn and in its middle, as for
    `random.random() < 0.0`, and where nothing is drawn but uniformly.
    """
    outcomes = []
    for share in SHARES:
        calls, draw_times = list[ModuleCall](), list[int]()
        with as_found([record.model], record.written), training(record.model), torch.no_grad(), drawing(share):
            seed_host(0)
            with _calling(record.model.named_modules(), calls, Flow(()), draw_times) as tick:
                returned = run_model(record.model, record.sample, record.always, record.written)
                tick()
        calls = sorted([call for call in calls if call.name in names], key=lambda call: call.begin)
        if draws_behind(draw_times, calls):
            return True
        outcomes.append(([call.name for call in calls], returned))
    return not all([same_numbers(outcome, outcomes[0]) for outcome in outcomes])


@contextmanager
def forward_is_call(module: nn.Module) -> Iterator[None]:
    """Within: who calls a module's forward calls the module, so its hooks see that."""
    attributes, original, running = vars(module), module.forward, list[nn.Module]()
    own = {"forward": original} if "forward" in attributes else {}

    def leave(*_: Any) -> None:
        del running[-1:]

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if running else module(*args, **kwargs)

    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(lambda *_: running.append(module)).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        attributes["forward"] = forward
        stack.callback(attributes.update, own)
        stack.callback(attributes.pop, "forward", None)
        yield


def _how_called(model: nn.Module, sample: Any, always: Iterable[str], mode: str) -> str:
    hint = ""
    if isinstance(sample, Mapping):
        names = ", ".join(f"{name}=" for name in [*sample, *always])
        hint = f" Its arguments were {names}; to hand it a dict, give (sample,)."
    return (
        f"to_sequential called {type(model).__name__} with the sample in {mode} mode, without gradients: it must run "
        f"so in both. Let a function around its Pipe differentiate what that returns.{hint}"
    )


def _names(model: nn.Module, storages: Container[int]) -> list[tuple[int, str]]:
    """The parameters and buffers that lie in some storages: id of the module, name."""
    return [
        (id(module), name) for module in model.modules() for name, tensor in chain(
            module._parameters.items(), module._buffers.items()
        ) if tensor is not None and storage_of(tensor) in storages
    ]  # fmt: skip


@contextmanager
def _setting(written: Container[int]) -> Iterator[dict[tuple[int, str], Any]]:
    """Within: note the attributes of modules that are set, and their values; no tensor that stays, and is not written.

    Args:
        written: the storages that are written.
    """
    set_attribute, register, values = nn.Module.__setattr__, nn.Module.register_buffer, dict[tuple[int, str], Any]()

    def note(module: nn.Module, name: str, value: Any) -> None:
        earlier = vars(module).get(name, module._buffers.get(name))
        if not stays(value, earlier) or storage_of(value) in written:
            values[id(module), name] = value

    def note_set(module: nn.Module, name: str, value: Any) -> None:
        note(module, name, value)
        set_attribute(module, name, value)

    def note_registered(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        note(module, name, tensor)
        register(module, name, tensor, persistent)

    nn.Module.__setattr__ = note_set  # type: ignore[method-assign, assignment]
    nn.Module.register_buffer = note_registered  # type: ignore[method-assign, assignment]
    try:
        yield values
    finally:
        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]
        nn.Module.register_buffer = register  # type: ignore[method-assign]


@contextmanager
def _calling(
    named_modules: Iterable[tuple[str, nn.Module]], calls: list[ModuleCall], flow: Flow, draw_times: list[int],
    reads: set[tuple[int, str, int]] | None = None,
) -> Iterator[Callable[[], int]]:  # fmt: skip
    """Within: note the calls of modules in a model, and when Python or numpy has drawn. It yields the clock.

    `reads`: of attributes of modules by others are added, see `ModelRecord`.
    """
    named_modules, states = list(named_modules), states_of(OUTSIDE_TORCH)
    root = next((module for name, module in named_modules if not name), None)

    def tick() -> int:
        nonlocal states
        time = flow.tick()
        if not stand_at(states):
            draw_times.append(time)
            states = states_of(OUTSIDE_TORCH)
        return time

    open_calls: list[
        tuple[nn.Module, int, CallArguments, dict[tuple[int, int], ArgumentKey], dict[ArgumentKey, int]]
    ] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        arguments = CallArguments(args, kwargs)
        tensors = {key: leaf for key, leaf in arguments.leaves.items() if isinstance(leaf, Tensor)}
        argument_keys = {_state(tensors[key]): key for key in sorted(reversed(tensors), key=arguments.is_argument)}
        nodes = {key: flow.node(leaf) for key, leaf in tensors.items()}
        open_calls.append((module, tick(), arguments, argument_keys, nodes))

    def after(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
            while open_calls[-1][0] is not module:  # its forward raised, and something around it caught that
                open_calls.pop()
            _, begin, arguments, argument_keys, nodes = open_calls.pop()
            leaves, tree = tree_flatten(returned)
            output_states = [_state(leaf) for leaf in leaves]
            flow.record_return(begin, leaves)
            writes = any(_state(arguments[key]) != state for state, key in argument_keys.items())
            calls.append(
                ModuleCall(name, begin, tick(), arguments, (leaves, tree), argument_keys, output_states, nodes, writes)
            )

        return note

    def note_read(module: nn.Module, name: str) -> Any:
        reader = open_calls[-1][0] if open_calls else root
        if reads is not None and module is not reader and name not in _OF_TORCH:
            reads.add((id(module), name, id(reader)))
        return object.__getattribute__(module, name)

    with ExitStack() as stack:
        if reads is not None:
            nn.Module.__getattribute__ = note_read  # type: ignore[method-assign, assignment]
            stack.callback(delattr, nn.Module, "__getattribute__")
        for name, module in named_modules:
            if name and not isinstance(module, torch.jit.ScriptModule):  # these have no such hooks
                stack.enter_context(forward_is_call(module))
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after(name), with_kwargs=True).remove)
        yield tick


def _state(value: Any) -> tuple[int, int]:
    """A tensor as it is now: what is written in place is another one."""
    return id(value), version_of(value)
