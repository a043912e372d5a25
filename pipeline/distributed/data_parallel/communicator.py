"""A call of one replica of a pipeline: with the other replicas, gradients become their means.

    DataParallelCommunicator ── the pipeline's own communicator: values, output, loss, verdict      each replica its own
               └─ the replicas' ranks: enter, sums as stages settle, means, leave                 once a backward pass

    whole gradients, divisor ─► means ─► all replicas have them ─► verdict: all ranks do ─► .grad, store, optimizer

A call is entered with both. A failure of either is passed on to the other, so in the end every rank of every pipeline
fails the call: a rank that waits, waits for one that fails or that waits itself, and each has someone to tell it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipeline.common.interrupts import LATE, Deferral
from pipeline.common.places import Place
from pipeline.data.loss import divide_
from pipeline.data.pytrees import Grads
from pipeline.data.values import Values
from pipeline.distributed.agreement import MODES, OPTIONS, SETTINGS, digest
from pipeline.distributed.data_parallel.gradient_means import GradientReducer, ReplicaLostError, lost
from pipeline.distributed.data_parallel.replicas import Replicas, members, refuse
from pipeline.distributed.data_parallel.shards import GradientBucket, Layout, with_external
from pipeline.distributed.failure.errors import Failure, RankError, silence
from pipeline.distributed.group import RankGroup, in_words
from pipeline.execution.communicator import Communicator, Output, Pair, Part, Verdict
from pipeline.execution.mailbox import Post
from pipeline.transports.local import Local
from scheduler import Action, Event

_ALIKE = (SETTINGS, MODES, OPTIONS)  # of what a call's ranks agree on, what replicas must agree on, too
_WHERE = ("replica ", "the replicas ")
_AGREED = (
    ", after all replicas had agreed that it took place: parameters and buffers may be changed in some and not in "
    "others. Load a checkpoint before the next step"
)
_GRACE = 0.5  # seconds that a rank whose connection broke waits for the reason


class DataParallelCommunicator(Communicator):
    """One call of a pipeline that has replicas.

    Args:
        inner: the pipeline's own processes.
        replicas: the replicas.
        layout: what travels between them.
        entry: what is called: "step".
        words: of the call whose backward this is: what the replicas must agree on.
    """

    def __init__(
        self,
        inner: Communicator,
        replicas: Replicas,
        layout: Layout,
        entry: str,
        words: Mapping[str, str] | None = None,
    ) -> None:
        self._inner = inner
        self._replicas = replicas
        self._ranks = replicas.ranks
        self._layout = layout
        self._entry = entry
        self._is_backward = words is not None
        self._words = dict(words or {})
        self._call = entry
        self._action: Action | None = None  # under way
        self._means: GradientReducer | None = None
        self._final: dict[int, Sequence[Pair]] = {}  # by stage
        self._votes = False  # all replicas are still to say that their gradients are there
        self._interrupts = Deferral()  # from the last vote to the end

    # ------------------------------------------------------------------------------------------------ begin and end

    def __enter__(self) -> DataParallelCommunicator:
        ranks, pipeline = self._ranks, self._replicas.pipeline
        self._call = f"{self._entry} (call {ranks.calls + 1} among the replicas)"
        is_within = ranks.is_in_call or (pipeline is not None and pipeline.is_in_call)
        failures = f" after failure {ranks.generation}" if ranks.generation else ""
        name = f"{self._entry} of Pipe {self._replicas.number}, call {ranks.calls_since + 1}{failures}"
        self._words["the calls"] = f"{name}, of {self._words['the calls']}" if self._is_backward else name
        try:
            self._inner.__enter__()
        except BaseException:
            if not is_within:
                ranks.watch.enter(ranks.generation, self._call, ranks.abort)
                self._pass_on()
            raise
        try:
            ranks.enter(self._call)
        except BaseException as error:
            if pipeline is None or is_within:
                raise
            pipeline.watch.fail(self._found(error))
            self._inner.__exit__(ReplicaLostError, ReplicaLostError(str(error)), None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupts.begin()
        try:
            if error is None:
                self._inner.__exit__(None, None, None)
                self._ranks.leave()
            elif self._replicas.pipeline is None:
                self._ranks.fail(error, self._call, self._action)
            else:
                self._fail(error, self._replicas.pipeline)
        finally:
            if error is None and self._is_backward:
                self._interrupts.end_with_backward()
            else:
                self._interrupts.end(LATE.format(self._entry) if error is None else "")

    def _fail(self, error: BaseException, pipeline: RankGroup) -> NoReturn:
        """The call failed here: make it everyone's failure, first the pipeline's, then the replicas'."""
        if isinstance(error, ReplicaLostError):
            pipeline.watch.fail(self._found(error))
        try:
            self._inner.__exit__(type(error), error, error.__traceback__)
        finally:
            self._pass_on()
        raise error

    def _found(self, error: BaseException) -> Failure:
        """The failure of the call, as the replicas' ranks tell it; for the pipeline."""
        ranks = self._ranks
        found = ranks.watch.verdict(_GRACE)
        if found is None:
            waited = f"rank {ranks.rank} waited at {in_words(ranks.watch.at)}."
            found = silence(ranks.rank, self._call, f"rank {ranks.rank} lost a connection: {error}", waited)
        where = f"{_WHERE[1]}(ranks {members(ranks)} of the world, here 0 to {ranks.size - 1})"
        return _told_among(found, where)

    def _pass_on(self) -> None:
        """Make the pipeline's failure that of the replicas."""
        ranks, pipeline = self._ranks, self._replicas.pipeline
        assert pipeline is not None  # or nothing failed but here
        found = pipeline.watch.verdict(0.0)
        if found is None:
            found = silence(pipeline.rank, self._call, "the call failed before it began.")
        where = f"{_WHERE[0]}{ranks.rank} (ranks {members(pipeline)} of the world, here 0 to {pipeline.size - 1})"
        ranks.is_in_call = False
        ranks.watch.fail(_told_among(found, where))
        ranks.close()
        ranks.watch.leave()

    def open(
        self, words: Callable[[bool], Mapping[str, str]], draws: bool = True, tensors: Sequence[Tensor] = ()
    ) -> int:
        """As the pipeline's own. What replicas must agree on is compared when their gradients meet."""
        told: list[Mapping[str, str]] = []

        def listening(values: bool) -> Mapping[str, str]:
            told.append(words(values))
            return {**told[-1], "the replicas": f"number {self._replicas.index} of {self._replicas.count}"}

        seed = self._inner.open(listening, draws, tensors)
        found = told[-1] if told else words(False)
        self._words.update({name: found[name] for name in _ALIKE if name in found})
        return seed

    def again(self) -> DataParallelCommunicator:
        """The backward of this call."""
        return DataParallelCommunicator(self._inner.again(), self._replicas, self._layout, "backward", self._words)

    # -------------------------------------------------------------------------------------------------------- means

    @property
    def averages(self) -> bool:
        return True

    def settled(self, stage: int, pairs: Sequence[Pair]) -> None:
        """Send what is final, in the order of the slots."""
        self._final[stage] = pairs
        means = self._begun()
        while (slot := means.early) is not None and self._final.keys() >= set(slot.stages):
            means.send(_by_id(pair for stage in slot.stages for pair in self._final[stage]))

    def join_sums(self, parts: Sequence[Part]) -> dict[int, Pair]:
        found = self._inner.join_sums(parts)
        if not self._is_backward:  # a step averages when all divisors are known
            return found
        return {id(owner): (owner, grad) for owner, grad in self.average(list(found.values()), None)}

    def average(self, pairs: list[Pair], divisor: Tensor | None, waits: bool = False) -> list[Pair]:
        """Make whole gradients the means over the replicas.

        Raises:
            MismatchError: the replicas do not make the same call.
        """
        means, self._means = self._begun(), None
        divisor = self._shared(divisor)
        last, grads = with_external(self._layout, pairs), _by_id(pairs)
        note = self._note(last, divisor)
        while means.early is not None:
            means.send(grads)
        means.send_last(last, grads, note)
        sums, notes = means.receive()
        if any(each[:-2] != note[:-2] for each in notes):
            self._refuse(last)
        divisors = [_number(*each[-2:]) for each in notes]
        found = means.means(sums, divisors)
        self._votes = not waits
        if waits:
            with lost():
                self._ranks.exchange(note[:1])
            self._call += _AGREED
        others = [(owner, divide_(grad, divisor)) for owner, grad in _without(pairs, found)]  # no parameters
        return [*self._in_order(found), *others]

    def _shared(self, divisor: Tensor | None) -> Tensor | None:
        """The divisor, which only the rank of the last stage knows."""
        pipeline = self._replicas.pipeline
        if pipeline is None or self._is_backward:
            return divisor
        found = pipeline.exchange([divisor is not None, _bits(divisor)])
        return next((_number(*each) for each in found if each[0]), None)

    def _in_order(self, pairs: Sequence[Pair]) -> list[Pair]:
        """In the order of the modules, as without replicas, whatever travelled first."""
        order = {id(parameter): index for index, parameter in enumerate(self._layout.parameters)}
        return sorted(pairs, key=lambda pair: order.get(id(pair[0]), len(order)))

    def _refuse(self, last: GradientBucket) -> NoReturn:
        lines = [
            f"parameter {index} of shape {list(each.shape)} is {'trained' if each.requires_grad else 'frozen'}"
            for index, each in enumerate(self._layout.parameters)
        ]
        external = last.parameters[len(self._layout.slots[-1].parameters) :]
        lines += [f"a parameter of shape {list(each.shape)} that is not the module's" for each in external]
        with lost():
            refuse(self._ranks, {**self._words, "the parameters": "\n".join(lines)})

    def _begun(self) -> GradientReducer:
        if self._means is None:
            self._means = GradientReducer(self._ranks, str(self._replicas.number), self._layout.slots)
        return self._means

    def _note(self, last: GradientBucket, divisor: Tensor | None) -> list[int]:
        """What this replica tells the others: digests of what must be alike, and its divisor."""
        texts = [self._words.get(name, "") for name in ("the calls", *_ALIKE)]
        flags = "".join(["01"[parameter.requires_grad] for parameter in self._layout.parameters])
        shapes = [tuple(stranger.shape) for stranger in last.parameters[len(self._layout.slots[-1].parameters) :]]
        return [*[digest(text) for text in (*texts, f"{flags} {shapes}")], divisor is not None, _bits(divisor)]

    # --------------------------------------------------------------------------------------- as the pipeline's own

    def check_output_grads(self, grads: Grads) -> None:
        self._inner.check_output_grads(grads)

    def compare(self) -> None:
        self._inner.compare()

    @property
    def is_alone(self) -> bool:
        return False

    @property
    def failures(self) -> int:
        return self._inner.failures

    def refuse_external(self, leaves: Iterable[Tensor], who: str, stage: int | None = None) -> None:
        self._inner.refuse_external(leaves, who, stage)

    @property
    def stand_in(self) -> Tensor:
        return self._inner.stand_in

    def has(self, stage: int) -> bool:
        return self._inner.has(stage)

    def prepare(self, traffic: Callable[[], Sequence[Any]]) -> None:
        self._inner.prepare(traffic)

    def mailbox(self, values: Values, places: Mapping[int, Place], transport: Local) -> Post:
        return self._inner.mailbox(values, places, transport)

    def begin(self, phase: int) -> None:
        self._inner.begin(phase)

    def end(self) -> None:
        self._action = None
        self._inner.end()

    def at(self, action: Action) -> None:
        self._action = action
        self._ranks.watch.at = (action,)
        self._ranks.watch.steps += 1
        self._inner.at(action)

    def agree(self, verdict: Verdict) -> Verdict:
        """First those that have the same stages, then the pipeline: then all stages of all replicas have come this far.

        Where one replica has hooks that may still refuse the step, all wait for them.
        """
        self._interrupts.begin()
        if self._votes:
            self._inner.compare()  # what refuses one replica's call refuses all
            self._ranks.watch.at = "the vote of all replicas"
            with lost():
                found = self._ranks.exchange([self._replicas.number, verdict.hooks])
            verdict = verdict._replace(hooks=any(hooks for _, hooks in found))
        verdict = self._inner.agree(verdict)
        if verdict.hooks:
            self._interrupts.end()
        elif self._votes and not self._is_backward:
            self._call += _AGREED
        return verdict

    def close(self) -> None:
        self._inner.close()
        with lost():
            self._ranks.exchange([self._replicas.number])

    def share_output(self, output: Output | None) -> Output:
        return self._inner.share_output(output)

    def share_input_grads(self, grads: Grads | None) -> Grads:
        return self._inner.share_input_grads(grads)

    def total_norm(self, named: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        return self._inner.total_norm(named, norm_type)

    def joined_norm(self, norms: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        return self._inner.joined_norm(norms, norm_type)

    def share_divisor(self, divisor: Tensor | None) -> Tensor | None:
        self._interrupts.begin()
        return self._inner.share_divisor(divisor)

    def sum_over(self, numbers: Tensor) -> Tensor:
        return self._inner.sum_over(numbers)

    def any(self, here: bool) -> bool:
        return self._inner.any(here)

    def share_owners(self, owners: list[Tensor]) -> list[Tensor]:
        return self._inner.share_owners(owners)

    def gather(self, named: Mapping[str, Any]) -> dict[str, Any] | None:
        return self._inner.gather(named)

    def share_events(self, events: Sequence[Event]) -> list[Event]:
        return self._inner.share_events(events)


def _told_among(failure: Failure, where: str) -> Failure:
    """The failure, as it is told to ranks that count otherwise; where it comes from is told once."""
    if failure.call.startswith(_WHERE):
        return failure
    is_silence = failure.type_name.endswith(f".{RankError.__name__}")
    message = f"{where}: {failure.message}" if is_silence else failure.message
    return failure._replace(call=f"{where}, {failure.call}", message=message)


def _by_id(pairs: Iterable[Pair]) -> dict[int, Tensor]:
    return {id(owner): grad for owner, grad in pairs}


def _without(pairs: Iterable[Pair], others: Iterable[Pair]) -> list[Pair]:
    taken = {id(owner) for owner, _ in others}
    return [pair for pair in pairs if id(pair[0]) not in taken]


def _bits(value: Tensor | None) -> int:
    return 0 if value is None else int(struct.unpack("<q", struct.pack("<d", value.item()))[0])


def _number(is_there: int, bits: int) -> Tensor | None:
    """What `_bits` was given."""
    if not is_there:
        return None
    return torch.tensor(struct.unpack("<d", struct.pack("<q", bits))[0], dtype=torch.float64, device="cpu")
