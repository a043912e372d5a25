"""The joining of processes: the Pipes that ranks, or replicas, build at the same time become one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from pipeline.distributed.agreement import SETTINGS, MismatchError, difference, digest
from pipeline.distributed.assignment import TiedParameter
from pipeline.distributed.communicator import DistributedCommunicator
from pipeline.distributed.digests import Fingerprint
from pipeline.distributed.stale import is_stale, trained_elsewhere
from pipeline.entry.runtime import Runtime
from pipeline.entry.state.meta_init import ValueSource
from pipeline.entry.validation import settle_stages
from pipeline.execution.communicator import Exchange, Verdict


def join_ranks(
    runtime: Runtime, stages: Sequence[nn.Sequential], materialize: ValueSource
) -> dict[TiedParameter, Tensor]:
    """Join the Pipes that the other ranks build now into one. Their layers become placeholders here.

    Args:
        runtime: of the Pipe, which still has all layers.
        stages: all.
        materialize: where the values of layers on the meta device come from.

    Returns:
        This rank's copies of tied parameters.

    Raises:
        MismatchError: the ranks build different Pipes.
    """
    topology = runtime.topology
    assert topology is not None  # one process joins nobody
    placeholders = dict(topology.elsewhere(stages))
    count = sum(runtime.settings.balance)
    with DistributedCommunicator(topology, {}, f"Pipe({count} layers)") as communicator:
        descriptions = {SETTINGS: runtime.settings.words}
        seed = communicator.open(lambda values: descriptions, draws=materialize is not None)
        topology.ranks.refuse_shared_devices()
        _compare_values(communicator.exchange, stages, says=runtime.rank == 0)
        own_stages, devices = topology.assignment.own_stages, runtime.settings.layout.devices
        anywhere = partial(_fills_anywhere, communicator.exchange, _on_meta(runtime.module))
        settle_stages(stages, own_stages, devices, materialize, lambda: seed, anywhere)
        modules: dict[str, Any] = runtime.module._modules
        modes = runtime.settings.origin.modes
        own_layers = [layer for name, layer in modules.items() if name not in placeholders]
        stale_modules = trained_elsewhere([modules[name] for name in placeholders], own_layers, modes.model)
        for name, placeholder in placeholders.items():
            modes.add(modes.model or modules[name], placeholder)
        modules.update(placeholders)
        copies = runtime.tied()
        communicator.gradients.share_values(copies)
        communicator.agree(Verdict(None, None, True))
        topology.ranks.pipes += 1
    runtime.history.stale = stale_modules
    return copies


def _compare_values(exchange: Exchange, stages: Sequence[nn.Sequential], says: bool) -> None:
    """Warn, on a rank that `says` so, if a stage has other values on one rank than on another."""
    rows = exchange.rows([_fingerprint(stage) for stage in stages])
    differing = [index for index, numbers in enumerate(zip(*rows)) if len({*numbers} - {0}) > 1]
    if differing and says:
        warnings.warn(
            f"the ranks' models have other values in stages {differing}, and a stage has those of its rank's model. "
            "Where one rank alone has loaded a state, load it on every rank. To begin with the values of one process, "
            "set the same seed on every rank before it builds the model. (What a rank does not need may be on the meta "
            "device there.)", UserWarning, stacklevel=2,
        )


def _fingerprint(stage: nn.Module) -> int:
    """The fingerprint of the values of a stage. 0: some are not there, or those of before another rank has trained."""
    tensors = [*nn.Module.parameters(stage), *stage.buffers()]
    is_known = all([type(tensor) in (Tensor, nn.Parameter) and not tensor.is_quantized for tensor in tensors])
    if not is_known or any([tensor.is_meta for tensor in tensors]) or any(map(is_stale, stage.modules())):
        return 0
    return Fingerprint(tensors).number


def _on_meta(module: nn.Module) -> str:
    """The names of what a module has on the meta device, a line each."""
    named = chain(nn.Module.named_parameters(module), module.named_buffers())
    return "\n".join([name for name, tensor in named if tensor.is_meta])


def _fills_anywhere(exchange: Exchange, on_meta: str, fills: bool) -> bool:
    """Whether any rank gives values to tensors on the meta device.

    Args:
        exchange: between the ranks.
        on_meta: the names of what this rank's whole model has there.
        fills: whether this rank gives values.

    Raises:
        MismatchError: one does, and models differ: the stages would have their values of several sources.
    """
    rows = exchange.rows([fills, digest(on_meta)])
    if not any([rank_fills for rank_fills, _ in rows]):
        return False
    if len({rank_digest for _, rank_digest in rows}) > 1:
        what = difference([{"the tensors on the meta device": names} for names in exchange.rows(on_meta)])
        raise MismatchError(
            f"{what}. Build the model anew on the meta device, on every rank, with the same materialize= (a state that "
            "one rank alone has goes to the others by torch.distributed.broadcast_object_list). Where an earlier Pipe, "
            "with another balance say, has given each rank's part of the model its values, materialize= would give "
            "others to the rest; what that Pipe has trained is in its full_state_dict()."
        )
    return True
