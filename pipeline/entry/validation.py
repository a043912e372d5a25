"""Validation of a Pipe's arguments before anything runs, and the defaults for those that were not given.

    Pipe(module, balance, devices=..., schedule=...)  -->  check_plain, choose_balance, choose_places, check_schedule
    pipe.step(...)                                    -->  check_hooks; its arguments: entry/step_arguments.py

Each error says what was wrong, the value, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from partition import balance_costs
from partition.names import LayeredModule, sequential
from partition.splitting import check_balance, check_shaped
from pipeline.common.accelerators import accelerators, moved_in_place
from pipeline.common.arguments import check_limit
from pipeline.common.errors import PLAIN
from pipeline.common.graph import refuse_tangents
from pipeline.common.places import Place, place_of
from pipeline.distributed.group import RankGroup, ranks_of
from pipeline.distributed.remote_layer import RemoteLayer
from pipeline.distributed.stale import refuse_stale
from pipeline.entry.state.meta_init import ValueSource, materialize
from pipeline.entry.state.meta_tensors import PlacedLayer
from pipeline.skip import SkipScope, within_scope
from scheduler import Action, Kind, Schedule, ScheduleError


class StageView(LayeredModule, nn.Sequential):
    """A stage as the caller sees it: the Pipe's own layers, in a Sequential that is never run."""

    def __init__(self, stage: nn.Sequential) -> None:
        super().__init__()
        layers: Mapping[str, Any] = stage._modules
        self._modules.update(layers)
        self.training = stage.training

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "pipe.partitions shows the stages; the Pipe runs their layers, not these Sequentials, so a hook or a layer "
            "put on one would have no effect. Put the hook on a layer, such as pipe.partitions[0][-1], or change the "
            "nn.Sequential and wrap it anew."
        )

    register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse
    __setitem__ = __delitem__ = append = extend = insert = _refuse


def _has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module does more than its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def check_hooks(pipe: nn.Module, entry: str) -> None:
    """Refuse a step of a Pipe with hooks, which see whole mini-batches."""
    if _has_hooks(pipe):
        raise ValueError(
            f"the Pipe has hooks of its own, which run in pipe(x) and would not run in {entry}, where no output of the "
            "whole mini-batch is computed. Register them on a layer, or call pipe(x)."
        )


def check_own_hooks(module: nn.Module) -> None:
    """Refuse hooks of what a Pipe was made of: only its layers are called."""
    if _has_hooks(module):
        raise ValueError(
            "the nn.Sequential has hooks of its own, which would not run. Register them on the Pipe, where they run in "
            "pipe(x), or on a layer."
        )


def check_plain(module: nn.Sequential) -> None:
    """Refuse a Sequential that does more than call its layers: a Pipe would leave that out."""
    check_own_hooks(module)
    if module._state_dict_hooks or module._state_dict_pre_hooks or module._load_state_dict_pre_hooks:
        raise ValueError("the nn.Sequential has state_dict hooks of its own, which would not run. Put them on a layer.")
    if module._parameters or module._buffers:
        names = ", ".join([*module._parameters, *module._buffers])
        raise ValueError(f"the nn.Sequential has parameters or buffers of its own ({names}). Put them into a layer.")
    remote = [name for name, layer in module.named_children() if isinstance(layer, RemoteLayer)]
    if remote:
        raise ValueError(
            f"layers {remote} are on other ranks: the nn.Sequential was taken from a Pipe over ranks. Build the "
            "Pipe from the module itself (on the meta device, if it is large)."
        )
    pipes = [(name, child) for name, child in module.named_modules() if isinstance(child, SkipScope)]
    inner = [name for name, pipe in pipes if getattr(pipe, "runtime").topology is not None]
    if inner:
        raise ValueError(
            f"layer {inner[0]} is, or holds, a Pipe that runs over ranks, so the one rank that runs this layer would "
            "wait for the others. Give the inner Pipe devices=[...], which keeps it in one process."
        )
    named = sequential(module._modules)
    check_shaped(named)
    tensors = [*named.named_parameters(), *named.named_buffers()]
    fake = [name for name, tensor in tensors if isinstance(tensor, FakeTensor)]
    if fake:
        raise ValueError(f"parameters without numbers: {fake[:5]}. Build the module outside of any FakeTensorMode.")


def find_ranks(
    group: Any, devices: Sequence[Place] | None, workers: str | None, heartbeat: float, timeout: float
) -> RankGroup | None:
    """The ranks to run on; None: this process runs everything, because devices are given or because it is the only one.

    Raises:
        TypeError, ValueError: arguments that are invalid, or that exclude each other.
    """
    check_limit("heartbeat", heartbeat)
    check_limit("timeout", timeout)
    if devices is not None:
        if group is not None:
            raise ValueError(
                "devices=[...] runs all stages in this process and group=... runs them on the ranks of a group. Give "
                "one of them."
            )
        return None
    ranks = ranks_of(group, heartbeat, timeout)
    if ranks is not None and workers is not None:
        raise ValueError(
            f"workers is {workers!r} but the Pipe runs over {ranks.size} ranks, where each has one thread. Leave "
            "workers out, or give devices=[...] to run in one process."
        )
    return ranks


def choose_balance(
    module: nn.Sequential,
    balance: Iterable[int] | None,
    devices: Sequence[Place] | None,
    ranks: RankGroup | None = None,
) -> list[int]:
    """Layers per stage: as given, or cut so that parameter bytes are even over the devices or ranks."""
    if balance is not None:
        return check_balance(balance, len(module))
    if ranks is not None:
        count = ranks.size
    else:
        count = len(devices) if devices is not None else max(1, len(accelerators()))
    costs = [sum(param.numel() * param.element_size() for param in layer.parameters()) for layer in module]
    return balance_costs(costs, min(count, len(costs)))


def choose_places(places: list[Place] | None, stages: int, ranks: RankGroup | None = None) -> list[Place]:
    """One place a stage: the first of those given, of all accelerators, or the CPU for all. On a rank: its own."""
    if ranks is not None:
        return [Place(ranks.device)] * stages
    if places is None:
        places = [Place(device) for device in accelerators()] or [place_of("cpu")] * stages
    if len(places) < stages:
        raise ValueError(
            f"balance has {stages} stages but there are {len(places)} devices ({', '.join(map(str, places))}). Give "
            f"devices=[...] with {stages} entries (repeats are allowed), or a balance of {len(places)} stages."
        )
    return places[:stages]


def check_shared_buffers(stages: Sequence[nn.Sequential], devices: Sequence[torch.device]) -> None:
    """Refuse buffers that two stages share where both would write them, or one has none: they are on one device.

    Stages on one device may read them. A forward that writes one is refused when it does. (Parameters may be shared.)
    """
    owner: dict[int, int] = {}
    named: dict[str, int] = {}
    for index, stage in enumerate(stages):
        written = {id(buffer) for _, norm in within_scope(stage, _BatchNorm) for buffer in norm.buffers()}
        for name, buffer in stage.named_buffers():
            first = owner.setdefault(id(buffer), index)
            if id(buffer) in written:  # by name: two parts of a model, of which each has been cast
                first = min(first, named.setdefault(name, index))
            if first != index and (id(buffer) in written or devices[first] != devices[index]):
                where = "" if id(buffer) in written else f", on {devices[first]} and {devices[index]}"
                raise ValueError(
                    f"buffer '{name}' is shared by stages {first} and {index}, which run different chunks at a "
                    f"time{where}. Put their layers into one stage, or give each a buffer of its own."
                )


def check_schedule(schedule: Schedule, stages: int) -> None:
    if schedule.stages != stages:
        raise ScheduleError(
            f"schedule {schedule.name} has {schedule.stages} stages but the balance has {stages}. Make it for {stages} "
            "stages."
        )
    before: dict[int, Action] = {}
    for action in schedule.actions:
        if action.kind is Kind.F:
            if action.chunk < before.setdefault(action.stage, action).chunk:
                raise ScheduleError(
                    f"schedule {schedule.name} runs {action} after {before[action.stage]}. In a Pipe the forwards of a "
                    f"stage ascend in chunks, since running statistics depend on their order: put {action} first."
                )
            before[action.stage] = action


def check_placement(schedule: Schedule, rank_of: Sequence[int]) -> None:
    """Refuse a schedule that puts stages on other ranks than those which have their layers."""
    lane_of = schedule.placement.lane_of
    if lane_of != tuple(rank_of):
        stage = next(index for index, rank in enumerate(rank_of) if lane_of[index] != rank)
        raise ScheduleError(
            f"schedule {schedule.name} runs stage {stage} on rank {lane_of[stage]}, but its layers are on rank "
            f"{rank_of[stage]}. Build another Pipe with this schedule, or choose one that has stages where these are: "
            f"{list(rank_of)}."
        )


def settle_stages(
    stages: Sequence[nn.Sequential],
    own_stages: Iterable[int],
    devices: Sequence[torch.device],
    source: ValueSource,
    seed: Callable[[], int],
    anywhere: Callable[[bool], bool] = bool,
) -> None:
    """Put some stages on their devices, and values into what is on the meta device.

    Args:
        stages: all.
        own_stages: those to place.
        devices: of each stage.
        source: where values come from, see entry/state/meta_init.py.
        seed: draws a seed, if one is needed.
        anywhere: whether a condition holds in any process.

    Raises:
        RuntimeError: one of those to place is trained by another rank of an earlier Pipe.
    """
    own_stages = set(own_stages)
    refuse_stale([named_module for stage in sorted(own_stages) for named_module in stages[stage].named_modules()])
    to_fill: list[PlacedLayer] = []
    others: list[PlacedLayer] = []
    for stage, layers in enumerate(stages):
        table: Mapping[str, Any] = layers._modules  # not named_children(), which leaves out a layer's second place
        for name, layer in table.items():
            placed_layer = PlacedLayer(len(to_fill) + len(others), name, layer, devices[stage])
            (to_fill if stage in own_stages else others).append(placed_layer)
    materialize(to_fill, source, seed() if source is not None else 0, others, anywhere)
    for stage in sorted(own_stages, reverse=True):
        with moved_in_place(devices[stage]):
            stages[stage].to(devices[stage])  # a layer that several stages share stays with the first


def refuse_transforms(tensors: Callable[[], Sequence[Tensor]]) -> None:
    """Raise for derivatives that do not go through autograd's graph, the only way that a Pipe supports.

    Args:
        tensors: gives the input, the parameters and the buffers; called only if forward-mode AD is on.

    Raises:
        RuntimeError: within torch.func transforms, or with forward-mode tangents.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "torch.func transforms (grad, vmap, jvp, jacrev ...) cannot see through a Pipe. Use torch.autograd.grad "
            f"with create_graph=True, which is exact to any order, or {PLAIN}."
        )
    if torch.autograd.forward_ad._current_level >= 0:
        refuse_tangents(tensors())
