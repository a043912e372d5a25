"""One forward of a module whose activations are dropped, with all that its recomputation needs to find unchanged.

    F    inputs --saved by autograd--> [ module ] --> outputs                  what is saved inside is dropped
    R    the same inputs --> the module again, all as it was at F --> what was dropped is back, and compared

`SavedTensors` handles autograd: it drops what F saves, and gives it back from R in a backward, at every order. This
module restores the state that R must find: attributes, parameters, submodules, buffers, switches and private generators
are as `ForwardSnapshot` keeps them; the default generators have their states. R has no side effects: afterwards every
attribute is as before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._C._autograd import _make_saved_tensor

from partition.contents import tensors_in
from partition.generators import generators_at, states_of
from partition.graph import nodes_of
from pipeline.common.errors import CheckpointError
from pipeline.common.graph import OF_SCRIPTS, holds
from pipeline.common.interrupts import DeferredSignals, calls_users_code
from pipeline.common.torch_modes import Ambient, outside_vmap
from pipeline.data.pytrees import Tree, detached, flatten, versions
from pipeline.recompute.fingerprints import addresses
from pipeline.recompute.policy import NO_HOOKS, checkpointing
from pipeline.recompute.randomness import default_generators
from pipeline.recompute.saved_tensors import SavedTensors
from pipeline.recompute.snapshot import ForwardSnapshot, StageTraits

_CHUNK = 0  # one forward, the only chunk of its ForwardSnapshot: what is kept is the call's beginning


def replayed(
    modules: list[nn.Module],
    forward: Callable[..., Any],
    name: str,
    traits: StageTraits,
    compares: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """F: call a module with arguments that are any pytrees.

    Args:
        modules: the module, and all below it.
        forward: its forward, without any checkpointing.
        name: how errors name it.
        traits: those that its earlier forwards have shown.
        compares: whether to observe those anew, and to compare whole outputs, not just some entries.
        args, kwargs: the arguments.

    Raises:
        CheckpointError: the module writes its input in place.
    """
    arguments = flatten((args, kwargs), None)
    tensors = arguments.tensors
    inputs, before = _SavedArguments(arguments), versions(tensors)
    parameters = [leaf for module in modules for leaf in module._parameters.values() if leaf is not None]
    require_grad, parameter_versions = [parameter.requires_grad for parameter in parameters], versions(parameters)
    known_addresses = addresses([*parameters, *tensors])
    buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
    devices = {tensor.device for tensor in (*buffers, *parameters, *tensors)}
    generators = states_of(default_generators(devices))
    device_types = dict.fromkeys(["cpu", *[device.type for device in devices]])
    ambient = Ambient.capture(device_types)._replace(saved_tensors_hooks=None)  # R has hooks of its own
    tables = [module._parameters for module in modules]
    snapshot = ForwardSnapshot(modules, ambient, name, 0, traits, compares, tables=tables)
    nodes = 0  # of the graph of F, if they were counted
    count: int | None = None  # of F's output tensors, once it is over

    def compute_again(saved: SavedTensors) -> None:
        args, kwargs = inputs.unpacked(name)
        _check_parameters(modules[0], name, parameters, parameter_versions)
        snapshot.resume(ambient.now())
        whole = compares and saved.is_over or not addresses(parameters) <= known_addresses
        with (
            DeferredSignals(), outside_vmap(), generators_at(generators), snapshot.as_at_forward(_CHUNK),
            _requiring(parameters, require_grad), checkpointing(False),
        ):  # fmt: skip
            recomputed = saved.filled(partial(_called, forward, args, kwargs), whole)
        if recomputed is None:
            return
        outputs = tensors_in(recomputed.result)
        if nodes and holds(_with_graphs(outputs), OF_SCRIPTS):
            _check_path(name, nodes, _nodes(outputs, tensors_in((args, kwargs))))
        if count is not None:  # else the module calls autograd within its forward: nothing to compare with yet
            are_as_many = recomputed.matches and len(outputs) == count
            _check_same(name, are_as_many and snapshot.fingerprints.agree(_CHUNK, outputs))

    try:
        with SavedTensors(compute_again, known_addresses), checkpointing(True):
            result = _called(forward, args, kwargs)
    except RuntimeError as error:
        if NO_HOOKS not in str(error):
            raise
        raise CheckpointError(
            f"{name} calls torch.func (grad, vjp, jacrev or hessian) within its forward, which cannot run where a "
            "checkpoint drops what autograd saves. Let it call torch.autograd.grad, or do not checkpoint this block."
        ) from error
    outputs = tensors_in(result)
    if compares:
        nodes = _nodes(outputs, tensors_in((args, kwargs)))
    snapshot.after_forward(_CHUNK, True, detached(outputs))
    snapshot.note()
    count = len(outputs)
    if versions(tensors) != before:
        raise CheckpointError(
            f"{name} writes its input in place, so it cannot be computed again from it. Let it write a copy "
            "(x = x + 1 instead of x += 1, inplace=False), or checkpoint a block that does not."
        )
    return result


def _check_parameters(module: nn.Module, name: str, parameters: Sequence[Tensor], then: Sequence[int]) -> None:
    now = versions(parameters)
    if now != then:
        rows = zip(parameters, then, now, strict=True)
        changed = next(parameter for parameter, earlier, version in rows if version != earlier)
        path = next((path for path, parameter in module.named_parameters() if parameter is changed), "")
        raise CheckpointError(
            f"parameter '{path}' of {name} was changed in place between the forward and the "
            "recomputation. Change it (optimizer.step()) after backward(). If the block writes it itself "
            "(nn.Embedding(max_norm=...)), do not checkpoint this block."
        )


def _check_path(name: str, then: int, now: int) -> None:
    """Raise if R has another graph: saved tensors are identified by their number alone."""
    if now != then:
        raise CheckpointError(
            f"torch.jit has compiled a function of {name} anew between the forward and the recomputation ({then} "
            f"autograd nodes then, {now} now), so the dropped tensors cannot be matched with the recomputed ones. This "
            "happens in the first calls for a shape: run forward and backward again, or run the block with gradients "
            "before it is checkpointed."
        )


def _check_same(name: str, matches: bool) -> None:
    if not matches:
        raise CheckpointError(
            f"the recomputation of {name} gave other values than its forward. It depends on state that is no buffer "
            "and no attribute, and has changed since (a list, a closure, a file, a parameter's .data), or on an input "
            "that is no tensor and was written (a cache). Make it a buffer, change it after backward(), or do not "
            "checkpoint this block."
        )


@contextmanager
def _requiring(parameters: Sequence[Tensor], require_grad: Sequence[bool]) -> Iterator[None]:
    """Within: parameters require gradients as they did, also those that were frozen or thawed since."""
    changed = [(one, flag) for one, flag in zip(parameters, require_grad, strict=True) if one.requires_grad is not flag]
    for parameter, flag in changed:
        parameter.requires_grad = flag
    try:
        yield
    finally:
        for parameter, flag in changed:
            parameter.requires_grad = not flag


@calls_users_code
def _called(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


class _SavedArguments:
    """The arguments of a forward. Autograd keeps the tensors, so that hooks of saved tensors see them.

    A tensor that occurs twice stays one, for layers that test `query is key`.
    """

    def __init__(self, arguments: Tree) -> None:
        self._rest = arguments._replace(tensors=())
        self._saved = [_make_saved_tensor(tensor, is_output=False) for tensor in arguments.tensors]

    def unpacked(self, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, cut from the graph that they came from."""
        try:
            saved_tensors = [saved.unpack() for saved in self._saved]
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise CheckpointError(
                f"an input of {name} was changed in place between the forward and the recomputation. Change it after "
                "backward(), or give the block a clone."
            ) from error
        tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in saved_tensors]
        args, kwargs = self._rest.build(tensors)
        return args, kwargs


def _nodes(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
    """The number of autograd nodes between them."""
    return len(nodes_of(_with_graphs(outputs), until=_with_graphs(inputs)))


def _with_graphs(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]
