"""The joining of processes: the Pipes that ranks, or replicas, build at the same time become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pipeline.distributed.agreement import SETTINGS
from pipeline.distributed.assignment import TiedParameter
from pipeline.distributed.communicator import DistributedCommunicator
from pipeline.distributed.stale import trained_elsewhere
from pipeline.entry.runtime import Runtime
from pipeline.entry.state.meta_init import ValueSource
from pipeline.entry.validation import settle
from pipeline.execution.communicator import Verdict


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
        own_stages, devices = topology.assignment.own_stages, runtime.settings.layout.devices
        settle(stages, own_stages, devices, materialize, lambda: seed, communicator.exchange.any)
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
