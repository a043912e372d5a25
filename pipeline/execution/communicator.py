"""The communicator: the interface through which a call reaches other processes.

    one process     LocalCommunicator   nothing: every stage is here
    torchrun        distributed         values that cross ranks, the output and the loss for everyone, one verdict

Entry points and calls use this interface alone, so they are the same in one process and over ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.common.places import Place
from pipeline.data.pytrees import Grads, Tree, add_grads
from pipeline.data.values import Values
from pipeline.execution.mailbox import Mailbox, Post
from pipeline.gradients.clip import joined_norm, total_norm
from pipeline.recompute.randomness import draw_seed
from pipeline.transports.local import Local
from scheduler import Action, Event

Part: TypeAlias = tuple[int, Tensor, Tensor]  # a stage, a parameter it reads, its gradient there
Pair: TypeAlias = tuple[Tensor, Tensor]  # a parameter, or another leaf, and its gradient


class Output(NamedTuple):
    """The joined output of a call, and which of its tensors need a gradient."""

    tree: Tree
    needs_grad: Sequence[bool]


class Verdict(NamedTuple):
    """What all processes of a step agree on.

    Attributes:
        loss: of the mini-batch. None: no rank computed one.
        divisor: divides the summed gradients. None: they stay as they are.
        reached: whether any process has a gradient.
        hooks: whether any process has hooks on gradients. The step has not taken place until they have run.
        metrics: of the mini-batch. Given by the process of the last stage; `agree` returns them everywhere.
    """

    loss: Tensor | None
    divisor: Tensor | None
    reached: bool
    hooks: bool = False
    metrics: Mapping[str, Tensor] = {}


class Communicator(ABC):
    """The processes that run a call together. The call runs within it as a context; a failure there fails all ranks."""

    @abstractmethod
    def __enter__(self) -> Communicator: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def open(
        self, words: Callable[[bool], Mapping[str, str]], draws: bool = True, tensors: Sequence[Tensor] = ()
    ) -> int:
        """Make sure that all ranks make the same call.

        Args:
            words: descriptions, by name, of what must be equal; called with whether to include the mini-batch's values.
            draws: whether this call draws a seed from torch's default CPU generator.
            tensors: of the mini-batch. Their values must be the same, too; where they are on an accelerator, `agree`
                finds out whether they are.

        Returns:
            The seed of the call; 0 if it draws none.

        Raises:
            MismatchError: the ranks make different calls.
        """

    def check_output_grads(self, grads: Grads) -> None:
        """Have `agree` check that the gradients of the output are the same on all ranks, but for rounding.

        Args:
            grads: those with which this process's backward begins. None: zeros.
        """

    def compare(self) -> None:
        """Compare now what `agree` would compare later.

        Raises:
            MismatchError: something differs between ranks.
        """

    @property
    @abstractmethod
    def is_alone(self) -> bool:
        """Whether this process has every stage."""

    @property
    def failures(self) -> int:
        """How many calls have failed on all processes together; the same number on each."""
        return 0

    @abstractmethod
    def refuse_external(self, leaves: Iterable[Tensor], who: str, stage: int | None = None) -> None:
        """Raise if gradients of these leaves would be lost on other ranks.

        Args:
            leaves: those that `who` read besides its input and the parameters of its modules.
            who: a stage, or the loss.
            stage: its index. None: the loss.
        """

    @property
    @abstractmethod
    def stand_in(self) -> Tensor:
        """A leaf for a process that has no parameters."""

    @abstractmethod
    def has(self, stage: int) -> bool:
        """Whether this process runs a stage."""

    @abstractmethod
    def prepare(self, traffic: Callable[[], Sequence[Any]]) -> None:
        """Give the messages of each phase: a `pipeline.distributed.p2p_plan.P2PPlan` each."""

    @abstractmethod
    def mailbox(self, values: Values, places: Mapping[int, Place], transport: Local) -> Post:
        """A mailbox for the values between the action that makes them and the one that reads them."""

    @abstractmethod
    def begin(self, phase: int) -> None:
        """Begin a phase, before its first action."""

    @abstractmethod
    def end(self) -> None:
        """End a phase, after its last action: everything that was sent has arrived."""

    @property
    def follows(self) -> bool:
        """Whether `at` must be called before every action."""
        return True

    @abstractmethod
    def at(self, action: Action) -> None:
        """Note the action that runs next."""

    @abstractmethod
    def again(self) -> Communicator:
        """A communicator for the backward of this call."""

    @abstractmethod
    def agree(self, verdict: Verdict) -> Verdict:
        """Wait for all ranks, and merge their verdicts."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all ranks have made their step. Hooks and optimizers are the user's code and may raise."""

    @abstractmethod
    def share_output(self, output: Output | None) -> Output:
        """The output, also on ranks that did not compute it."""

    @abstractmethod
    def share_input_grads(self, grads: Grads | None) -> Grads:
        """The gradients of the input, also on ranks without stage 0."""

    @abstractmethod
    def total_norm(self, named: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        """The norm of all processes' gradients as one vector, to the bit as if one process had them all.

        Args:
            named: this process's gradients under the plain module's names; "" for leaves outside the module.
            norm_type: as in torch.nn.utils.clip_grad_norm_.
        """

    @abstractmethod
    def joined_norm(self, norms: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        """The same, from the norm of each gradient."""

    @abstractmethod
    def sum_over(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, added in the order of the ranks.

        Args:
            numbers: float64, on the CPU.

        Raises:
            MismatchError: the ranks sum different things.
        """

    def share_divisor(self, divisor: Tensor | None) -> Tensor | None:
        """The divisor of a step, which the process of the last stage knows."""
        return divisor

    @abstractmethod
    def any(self, here: bool) -> bool:
        """Whether a condition holds in any process."""

    @abstractmethod
    def share_owners(self, owners: list[Tensor]) -> list[Tensor]:
        """Those of this process's parameters that any process uses."""

    @abstractmethod
    def join_sums(self, parts: Sequence[Part]) -> dict[int, tuple[Tensor, Tensor]]:
        """Whole gradients by the id of their owner: (owner, its stages' sums, added in the order of the stages)."""

    @abstractmethod
    def gather(self, named: Mapping[str, Any]) -> dict[str, Any] | None:
        """The named values of all ranks, on rank 0; None on the others."""

    @abstractmethod
    def share_events(self, events: Sequence[Event]) -> list[Event]:
        """What everyone recorded."""

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over replicas of the whole pipeline."""
        return False

    def settled(self, stage: int, pairs: Sequence[Pair]) -> None:
        """Note that a stage's last backward has run: its part of these owners' gradients is final."""

    def average(self, pairs: list[Pair], divisor: Tensor | None, waits: bool = False) -> list[Pair]:
        """Make whole gradients the means over the replicas, each divided by its replica's divisor first.

        Args:
            waits: return when all ranks have the means. Else `agree` waits for that.
            pairs: (owner, whole gradient) of this process; they may be written.
            divisor: of this replica, where this process knows one.
        """
        return pairs


class LocalCommunicator(Communicator):
    """The communicator of a process that has every stage."""

    def __enter__(self) -> LocalCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def open(
        self, words: Callable[[bool], Mapping[str, str]], draws: bool = True, tensors: Sequence[Tensor] = ()
    ) -> int:
        return draw_seed() if draws else 0

    @property
    def is_alone(self) -> bool:
        return True

    def refuse_external(self, leaves: Iterable[Tensor], who: str, stage: int | None = None) -> None:
        pass

    @property
    def stand_in(self) -> Tensor:
        return torch.empty(0, requires_grad=True, device="cpu")

    def has(self, stage: int) -> bool:
        return True

    def prepare(self, traffic: Callable[[], Sequence[Any]]) -> None:
        pass

    def mailbox(self, values: Values, places: Mapping[int, Place], transport: Local) -> Mailbox:
        return Mailbox(values, places, transport)

    def begin(self, phase: int) -> None:
        pass

    def end(self) -> None:
        pass

    @property
    def follows(self) -> bool:
        return False

    def at(self, action: Action) -> None:
        pass

    def again(self) -> LocalCommunicator:
        return self

    def agree(self, verdict: Verdict) -> Verdict:
        return verdict

    def close(self) -> None:
        pass

    def share_output(self, output: Output | None) -> Output:
        assert output is not None  # the last stage is here
        return output

    def share_input_grads(self, grads: Grads | None) -> Grads:
        assert grads is not None  # the first stage is here
        return grads

    def total_norm(self, named: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        return total_norm([grad for _, grad in named], norm_type)

    def joined_norm(self, norms: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        return joined_norm([norm for _, norm in norms], norm_type)

    def sum_over(self, numbers: Tensor) -> Tensor:
        return numbers

    def any(self, here: bool) -> bool:
        return here

    def share_owners(self, owners: list[Tensor]) -> list[Tensor]:
        return owners

    def join_sums(self, parts: Sequence[Part]) -> dict[int, tuple[Tensor, Tensor]]:
        return joined(parts)

    def gather(self, named: Mapping[str, Any]) -> dict[str, Any] | None:
        return dict(named)

    def share_events(self, events: Sequence[Event]) -> list[Event]:
        return list(events)


def joined(parts: Sequence[Part]) -> dict[int, tuple[Tensor, Tensor]]:
    """The parts of each owner, added in the order in which they stand."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for _, owner, grad in parts:
        earlier = found.get(id(owner))
        total = grad if earlier is None else add_grads(earlier[1], grad)
        assert total is not None  # because neither part is None
        found[id(owner)] = (owner, total)
    return found
