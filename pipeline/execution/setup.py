"""The settings of one call: frozen objects, handed on by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipeline.common.places import Place
from pipeline.data.values import Values
from pipeline.execution.communicator import Communicator
from pipeline.execution.plan import CallPlan
from pipeline.execution.trace import TraceRecorder
from pipeline.recompute.snapshot import StageTraits
from pipeline.transports.local import Local


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of the stages of a Pipe, and the transport between them in one process.

    Attributes:
        places: of each stage.
        values: the table of values that cross stages.
        transport: moves tensors between places.
        workers: how lanes run, see execution/drivers.py.
    """

    places: Sequence[Place]
    values: Values
    transport: Local
    workers: str | None

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage."""
        return [place.device for place in self.places]


@dataclass(frozen=True, eq=False)
class Setup:
    """The settings that a Pipe gives to a call.

    Attributes:
        stages: the layers of each stage.
        layout: where the stages are.
        plan: the orders that run.
        recompute: the (stage, chunk) pairs that are recomputed.
        grad: whether this call has gradients.
        keep: whether every chunk may have to be recomputed later, kept ones too (second order of `pipe(x)`).
        compares: whether whole recomputations are compared with their forwards.
        traits: the traits of the stages that earlier calls have observed; this call adds to them.
        defer: whether batch norms update their running statistics once, at the end.
        traces: the recorders of its actions.
        communicator: reaches the other processes that run this call.
        seed: of the call.
    """

    stages: Sequence[Sequence[nn.Module]]
    layout: Layout
    plan: CallPlan
    recompute: frozenset[tuple[int, int]]
    grad: bool
    keep: bool
    compares: bool
    traits: StageTraits
    defer: bool
    traces: Sequence[TraceRecorder]
    communicator: Communicator
    seed: int
