"""The communicator of a process that has every stage: there is nobody to agree with, and everything is here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.common.places import Place
from pipeline.data.values import Values
from pipeline.execution.communicator import (
    CommonTensors,
    Communicator,
    Describe,
    Exchange,
    Gradients,
    Pair,
    StageGrad,
    Topology,
    Verdict,
    joined,
)
from pipeline.execution.mailbox import LocalMailbox
from pipeline.execution.trace import Span
from pipeline.gradients.clip import joined_norm, total_norm
from pipeline.recompute.randomness import draw_seed
from pipeline.transports.local import Local
from pipeline.transports.message import Message
from scheduler import Action, Event


class LocalTopology(Topology):
    """All stages."""

    def __init__(self) -> None:
        self.nothing = torch.empty(0, requires_grad=True, device="cpu")

    def has(self, stage: int) -> bool:
        return True

    def refuse_external(self, leaves: Iterable[Tensor], who: str, stage: int | None = None) -> None:
        pass


class LocalExchange(Exchange):
    """Everything is here."""

    def mailbox(self, values: Values, places: Mapping[int, Place], transport: Local) -> LocalMailbox:
        return LocalMailbox(values, places, transport)

    def broadcast(self, name: str, stage: int, message: Message | None) -> Message:
        assert message is not None  # the first stage is here, and the last
        return message

    def gather(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return dict(named)

    def any(self, condition: bool) -> bool:
        return condition

    def sum_over(self, numbers: Tensor) -> Tensor:
        return numbers

    def total_norm(self, named: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        return total_norm([grad for _, grad in named], norm_type)

    def joined_norm(self, norms: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        return joined_norm([norm for _, norm in norms], norm_type)

    def share_events(self, events: Sequence[Event], steps: Sequence[Span]) -> tuple[list[Event], list[Span]]:
        return list(events), list(steps)


class LocalGradients(Gradients):
    """All parts are here."""

    def join(self, parts: Sequence[StageGrad]) -> dict[int, Pair]:
        return joined(parts)

    def shared(self, pairs: dict[int, Pair]) -> dict[int, Pair]:
        return pairs


class LocalCommunicator(Communicator):
    """The communicator of a process that has every stage."""

    is_alone = True

    def __init__(self) -> None:
        self.topology = LocalTopology()
        self.exchange = LocalExchange()
        self.gradients = LocalGradients()

    def __enter__(self) -> LocalCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def open(self, words: Describe, draws: bool = True, tensors: CommonTensors = CommonTensors()) -> int:
        return draw_seed() if draws else 0

    def at(self, action: Action | None) -> None:
        pass

    def share_divisor(self, divisor: Tensor | None) -> Tensor | None:
        return divisor

    def agree(self, verdict: Verdict) -> Verdict:
        return verdict

    def close(self) -> None:
        pass

    def again(self, entry: str = "backward") -> LocalCommunicator:
        return self
