"""The communicator of a call over ranks.

    open     digests of the call, the settings and the mini-batch, and rank 0's seed        all to all
    phases   messages in the order of the P2PPlan
    agree    the loss, its divisor: the step has happened on all ranks or on none       all to all
    share_*  the output from the last rank, the gradients of the input from the first, whole gradients of tied weights

Where any rank has tensor hooks, they run between two votes: whether the run succeeded, and whether the hooks did. A
failure of an optimizer cannot be voted on beforehand: a barrier after its step reports it in the same call.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipeline.common.cadence import validates
from pipeline.common.interrupts import LATE, Deferral
from pipeline.common.places import Place
from pipeline.data.pytrees import Grads, Tree, add_grads, flatten
from pipeline.data.values import Values
from pipeline.distributed.agreement import (
    MINI_BATCHES,
    OPTIONS,
    MismatchError,
    difference,
    digest,
    encoded,
    values_in_words,
)
from pipeline.distributed.digests import Fingerprint, Sketch, Sketches
from pipeline.distributed.mailbox import RankMailbox
from pipeline.distributed.p2p_plan import P2PPlan
from pipeline.distributed.topology import PipeTopology
from pipeline.execution.communicator import Communicator, Output, Part, Verdict, joined
from pipeline.execution.mailbox import Post
from pipeline.gradients.clip import joined_norm, norm_of
from pipeline.recompute.randomness import draw_seed
from pipeline.transports.local import Local
from pipeline.transports.message import Message
from scheduler import Action, Event

_MAGIC = 0x70656E73746F636B  # "penstock"
_FIRST = 12  # the number of numbers in a call's first exchange
_AGREED = (
    ", after all ranks had agreed that it took place: gradients, parameters and buffers may be changed on some ranks "
    "and not on others. Load a checkpoint before the next step"
)
_GRADIENTS = (
    "the gradients of the output differ between the ranks, in its tensor {}: {}. Every rank computes the loss, and all "
    "must compute the same: give all the same targets and weights, and the same seed to generators that the loss draws "
    'from; or let the last rank alone compute it, with pipe(x, output="last")'
)
_VOTED = (
    "had told the others that all went well, and did not hear from all of them: the step may have taken place on some "
    "ranks and not on others. Load a checkpoint before the next step"
)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class DistributedCommunicator(Communicator):
    """One call, over the ranks.

    Args:
        topology: the topology.
        tied: this rank's copies of tied parameters, None where it has none.
        entry: the entry point that is called: "step".
        of: the call whose backward this is, described equally on all ranks.
        series: of that call; the key of its cached message specs.
    """

    def __init__(
        self, topology: PipeTopology, tied: Sequence[Tensor | None], entry: str, of: str | None = None, series: str = ""
    ) -> None:
        self._topology = topology
        self._tied = tied
        self._ranks = topology.ranks
        self._hosting = topology.hosting
        self._entry = entry if of is None else f"{entry} of {of}"
        self.number = 0  # of the calls since the last failure
        self._name = ""
        self._call = entry
        self._is_backward = of is not None
        self._builds = entry.startswith("Pipe(")
        self._series = series
        self._traffic: Sequence[P2PPlan] = ()  # of each phase
        self._now: P2PPlan | None = None
        self._action: Action | None = None  # under way
        self._phase = 0
        self._unfinished: list[int] = []  # ranks that have a message on its way
        self._interrupts = Deferral()  # from the last vote to the end
        self._standing = ""  # the progress of the step, for errors
        self._words: Callable[[bool], Mapping[str, str]] = lambda values: {}
        self._mini_batch = Fingerprint(())
        self._is_compared = True  # the mini-batch, with the others'
        self._sketches = Sketches(())  # of the gradients of the output

    # ------------------------------------------------------------------------------------------------ begin and end

    def __enter__(self) -> DistributedCommunicator:
        since, failures = self._ranks.calls_since + 1, self._ranks.generation
        self.number = since
        self._name = f"call {since} after failure {failures}" if failures else f"call {since}"
        self._call = f"{self._entry} (call {self._ranks.calls + 1} of the script)"
        self._ranks.enter(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupts.begin()
        try:
            if error is None:
                self._ranks.leave()
                return
            if self._builds:
                self._ranks.pipes = self._topology.number  # there is no such Pipe; other ranks may not have begun one
            self._ranks.fail(error, self._call, self._action, self._standing)
        finally:
            if error is None and self._is_backward:
                self._interrupts.end_with_backward()
            else:
                self._interrupts.end(LATE.format(self._entry) if error is None else "")

    def open(
        self, words: Callable[[bool], Mapping[str, str]], draws: bool = True, tensors: Sequence[Tensor] = ()
    ) -> int:
        """Compare the calls of all ranks. Validating calls compare all values of the mini-batch."""
        values = validates(self.number)
        self._words = words
        mine = self._told(values)
        digests = [digest(text) for text in mine.values()]
        self._mini_batch = Fingerprint(tensors)
        here = self._mini_batch.number if self._mini_batch.is_here else 0
        seed = draw_seed() if draws else 0
        found = self._ranks.exchange([_MAGIC, seed, here, len(digests), *digests, *[0] * (_FIRST - 4 - len(digests))])
        numbers = {number for _, _, number, *_ in found}
        if any(each[3:] != found[0][3:] for each in found) or len(numbers - {0}) > 1:
            self._refuse()
        self._is_compared = 0 not in numbers
        if values:
            self._check_ties()
        if not self._series:
            of = digest(mine.get(OPTIONS, "") + mine.get(MINI_BATCHES, ""))
            self._series = f"{self._topology.number}/{self._entry}/{of}"
        return found[0][1]

    def _told(self, values: bool) -> dict[str, str]:
        """Descriptions of all that must be the same on all ranks."""
        return {"the calls": f"{self._entry} of Pipe {self._topology.number}, {self._name}", **self._words(values)}

    def _refuse(self) -> NoReturn:
        """Raise on all ranks, after digests differed: exchange the descriptions.

        Raises:
            MismatchError: describes the difference.
        """
        mine = self._told(True)
        texts = self._ranks.exchange_texts(encoded(mine))
        raise MismatchError(
            f"{difference(texts, list(mine))}. All ranks run the same script: the same Pipe, the same calls in "
            "the same order, the same mini-batches. Set torch.manual_seed(...) at its top, and give samplers and "
            "generators the same seed on every rank."
        )

    def check_output_grads(self, grads: Grads) -> None:
        self._sketches = Sketches(grads)

    def compare(self) -> None:
        numbers = self._to_compare()
        if numbers != [0]:
            self._compare(self._ranks.exchange(numbers))

    def _to_compare(self) -> list[int]:
        """The mini-batch, if not all ranks had its fingerprint when the call began; the gradients of the output."""
        late = 0 if self._is_compared else self._mini_batch.number
        return [late, *[_as_bits(value) for sketch in self._sketches.values for value in sketch]]

    def _compare(self, rows: Sequence[Sequence[int]]) -> None:
        """Check once that all ranks' numbers are alike."""
        if len({late for late, *_ in rows}) > 1:
            self._refuse()
        found = [[_number(bits) for bits in row[1:]] for row in rows]
        size = len(Sketch._fields)
        for index in range(len(found[0]) // size):
            sketches = [Sketch(*row[size * index : size * (index + 1)]) for row in found]
            if not all(sketch.is_like(sketches[self._hosting.last]) for sketch in sketches):
                told = "; ".join(f"rank {rank}: {sketch}" for rank, sketch in enumerate(sketches))
                raise MismatchError(_GRADIENTS.format(index, told))
        self._is_compared, self._sketches = True, Sketches(())

    def _check_ties(self) -> None:
        """Raise if copies of a tied parameter are no longer the same."""
        if not self._tied:  # there are none, or they are not built yet
            return
        mine = ["" if copy is None else f"{values_in_words([copy])} {copy.requires_grad}" for copy in self._tied]
        found = self._ranks.exchange([digest(text) for text in mine])
        for index, tie in enumerate(self._hosting.ties[: len(mine)]):
            if len({found[rank][index] for rank in tie.holders}) > 1:
                names = " = ".join(f"'{name}'" for _, name in tie.readers)
                raise MismatchError(
                    f"the tied parameter {names} has other values, or another requires_grad, on rank {tie.owner} than "
                    f"on another of ranks {list(tie.holders)}. Change it on all of them alike: give it to the "
                    "optimizer of each, with the same settings."
                )

    @property
    def is_alone(self) -> bool:
        return False

    @property
    def failures(self) -> int:
        return self._ranks.generation

    def refuse_external(self, leaves: Iterable[Tensor], who: str, stage: int | None = None) -> None:
        for leaf in leaves:
            name = self._topology.name_of(leaf)
            if name is not None and stage is not None and self._topology.is_own(name):
                continue  # only this rank needs its gradient
            if name is not None:
                raise RuntimeError(
                    f"{who} computes with parameter '{name}' of the model, past the stages. Over ranks each has its "
                    "own stages' parameters, so the others would not see this gradient. Add a penalty on parameters to "
                    "pipe(x)'s loss, loss_fn(pipe(x), target) + penalty on every rank, or use the optimizer's "
                    "weight_decay; pass a weight that several layers share as a tied parameter."
                )
            if stage is None:
                raise RuntimeError(
                    f"{who} has a tensor of shape {list(leaf.shape)} that requires a gradient. Over ranks only the "
                    "last one computes the loss, so the copies of the others would not be trained. Use "
                    "loss_fn(pipe(x), target).backward(), where every rank computes it, or make it a layer of "
                    "the model."
                )

    @property
    def stand_in(self) -> Tensor:
        return self._topology.nothing

    def again(self) -> DistributedCommunicator:
        """The backward of this call."""
        later = DistributedCommunicator(self._topology, self._tied, "backward", self._name, self._series)
        later._traffic = self._traffic
        return later

    # ------------------------------------------------------------------------------------------------------- phases

    def has(self, stage: int) -> bool:
        return self._hosting.rank_of[stage] == self._hosting.rank

    def prepare(self, traffic: Callable[[], Sequence[P2PPlan]]) -> None:
        self._traffic = traffic()

    def mailbox(self, values: Values, places: Mapping[int, Place], transport: Local) -> Post:
        here = self._hosting.rank
        return RankMailbox(
            values, self._hosting.rank_of, here, self, self._current, Place(self._ranks.device), transport
        )

    def _current(self) -> P2PPlan:
        assert self._now is not None  # a phase has begun
        return self._now

    def begin(self, phase: int) -> None:
        self._now, self._phase = self._traffic[phase], phase
        series = f"{self._series}/{phase}"
        for (source, to), slots in self._now.slots.items():
            names = [slot.name for slot in slots]
            if to == self._hosting.rank:
                self._ranks.receiver(source).begin(series, names)
            else:
                self._ranks.sender(to).begin(series, names)

    def end(self) -> None:
        self._action = None
        for source, to in self._current().slots:
            if to == self._hosting.rank:
                self._ranks.receiver(source).finish()
        for source, to in self._current().slots:
            if to != self._hosting.rank:
                self._ranks.watch.at = f"the end, for rank {to} to receive the last messages"
                self._ranks.sender(to).finish()
        self._now = None

    def at(self, action: Action) -> None:
        self._action = action
        self._ranks.watch.at = (action,)
        self._ranks.watch.steps += 1

    def send(self, rank: int, slot: str, letter: Message) -> None:
        self._ranks.sender(rank).send(slot, letter)

    def receive(self, rank: int, slot: str) -> Message:
        self._ranks.watch.at = (self._action, "for", slot + ", from rank", rank)
        receiver = self._ranks.receiver(rank)
        found = receiver.receive(slot)
        self._ranks.watch.at = (self._action,)
        here = self._hosting.rank
        if (here, rank) in self._current().slots:
            self._ranks.sender(rank).reap(self._current().delivered((rank, here), receiver.position))
        return found

    # ------------------------------------------------------------------------------------------------------ together

    def agree(self, verdict: Verdict) -> Verdict:
        """Wait for all ranks, and merge their verdicts.

        A rank that has voted yes takes part in any case: interrupts wait until the call has ended, or until a later
            vote
        follows.
        """
        self._finish_all()
        self._interrupts.begin()
        steps = self._entry == "step"
        self._standing = _VOTED if steps else ""
        loss, divisor, reached, hooks, metrics = verdict
        kind = -1 if loss is None else _DTYPES.index(loss.dtype)
        mine = [_MAGIC + 1, reached, hooks, kind, _bits(loss), divisor is not None, _bits(divisor), len(metrics)]
        found = self._ranks.exchange([*mine, *self._to_compare()])
        self._compare([each[len(mine) :] for each in found])
        reached, hooks = any(each[1] for each in found), any(each[2] for each in found)
        if steps and reached and not hooks:
            self._call += _AGREED
            self._standing = f"was in {self._call}"
        if hooks:
            self._standing = ""
            self._interrupts.end()
        _, _, _, kind, bits, divides, divisor_bits, has_metrics, *_ = found[self._hosting.last]
        device = self._ranks.device
        if loss is None and kind >= 0:
            loss = torch.tensor(_number(bits), dtype=_DTYPES[kind], device=device)
        if divisor is None and divides:
            divisor = torch.tensor(_number(divisor_bits), dtype=torch.float64, device=device)
        return Verdict(loss, divisor, reached, hooks, self._shared_metrics(metrics) if has_metrics else {})

    def _shared_metrics(self, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The metrics of the last rank, on this rank's device."""
        what = "the metrics"
        if self._hosting.rank == self._hosting.last:
            tree = flatten(dict(metrics), what)
            self._to_all(what, Message(tree.tensors, tree.skeleton))
            return dict(metrics)
        letter = self._from(self._hosting.last, what)
        tree = Tree(tuple([tensor for tensor in letter.tensors if tensor is not None]), letter.skeleton)
        found: dict[str, Tensor] = tree.build(tree.tensors)
        return found

    def close(self) -> None:
        self._ranks.exchange([_MAGIC + 2])

    def share_divisor(self, divisor: Tensor | None) -> Tensor | None:
        """The divisor from the last rank, which does not wait until the others have it.

        A rank needs it before it updates its own parameters: from then on interrupts wait.
        """
        self.compare()
        self._interrupts.begin()
        what = "the divisor"
        if self._hosting.rank != self._hosting.last:
            return self._from(self._hosting.last, what).tensors[0]
        self._unfinished = [rank for rank in range(self._ranks.size) if rank != self._hosting.rank]
        for rank in self._unfinished:
            self._ranks.send_one(rank, f"{self._series}/{what}", what, Message((divisor,)))
        return divisor

    def _finish_all(self) -> None:
        """Wait until others have received all that was sent without waiting."""
        while self._unfinished:
            self._finish(self._unfinished.pop())

    def share_output(self, output: Output | None) -> Output:
        if output is None:
            letter = self._from(self._hosting.last, "the output")
            tree = Tree(tuple([tensor for tensor in letter.tensors if tensor is not None]), letter.skeleton)
            return Output(tree, letter.needs_grad)
        letter = Message(output.tree.tensors, output.tree.skeleton, tuple(output.needs_grad))
        self._to_all("the output", letter)
        return output

    def share_input_grads(self, grads: Grads | None) -> Grads:
        if grads is None:
            return self._from(self._hosting.first, "the gradients of the input").tensors
        self._to_all("the gradients of the input", Message(grads))
        return grads

    def _to_all(self, what: str, letter: Message) -> None:
        others = [rank for rank in range(self._ranks.size) if rank != self._hosting.rank]
        for rank in others:
            self._ranks.send_one(rank, f"{self._series}/{what}", what, letter)
        for rank in others:
            self._finish(rank)

    def _from(self, rank: int, what: str) -> Message:
        return self._ranks.receive_one(rank, f"{self._series}/{what}", what)

    def _finish(self, rank: int) -> None:
        self._ranks.watch.at = f"the end, for rank {rank} to receive the last messages"
        self._ranks.sender(rank).finish()

    def gather(self, named: Mapping[str, Any]) -> dict[str, Any] | None:
        tree = flatten(dict(named), f"the state of rank {self._hosting.rank}")
        tensors = tuple([tensor.detach() for tensor in tree.tensors])
        what = "the state"
        if self._hosting.rank != 0:
            self._ranks.send_one(0, f"{self._series}/{what}", what, Message(tensors, tree.skeleton))
            self._finish(0)
            self.agree(Verdict(None, None, True))
            return None
        found = dict(named)
        for rank in range(1, self._ranks.size):
            letter = self._from(rank, what)
            theirs = Tree(tuple([tensor for tensor in letter.tensors if tensor is not None]), letter.skeleton)
            found.update(theirs.build(theirs.tensors))
        self.agree(Verdict(None, None, True))
        return found

    def share_events(self, events: Sequence[Event]) -> list[Event]:
        text = json.dumps([[str(event.action), event.lane, event.start, event.end] for event in events])
        found = [json.loads(each) for each in self._ranks.exchange_texts(text)]
        return [Event(Action.parse(action), lane, start, end) for each in found for action, lane, start, end in each]

    def total_norm(self, named: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        norms = [(name, norm_of(grad, norm_type)) for name, grad in named]
        self._interrupts.begin()  # all ranks scale their gradients, or none does
        return self.joined_norm(norms, norm_type)

    def joined_norm(self, norms: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        mine = [[name, str(norm.dtype).removeprefix("torch."), float(norm.item()).hex()] for name, norm in norms]
        names = self._topology.first_names
        found: dict[str, tuple[str, str]] = {}
        more = []
        for rank, text in enumerate(self._ranks.exchange_texts(json.dumps(mine))):
            for name, dtype, value in json.loads(text):
                if name:
                    found.setdefault(names.get(name, name), (dtype, value))  # a tied parameter counts once
                elif rank == self._hosting.last:
                    more.append((dtype, value))
        in_order = [found[name] for name in dict.fromkeys(names.values()) if name in found]
        told = [
            torch.tensor(float.fromhex(value), dtype=getattr(torch, dtype), device="cpu")
            for dtype, value in [*in_order, *more]
        ]
        return joined_norm(told, norm_type).to(self._ranks.device)

    def sum_over(self, numbers: Tensor) -> Tensor:
        """One exchange for a few numbers, two for more: the first has the length of every call's first."""
        mine: list[int] = numbers.cpu().contiguous().view(-1).view(torch.int64).tolist()
        few = mine[: _FIRST - 2]
        found = self._ranks.exchange([_MAGIC + 3, len(mine), *few, *[0] * (_FIRST - 2 - len(few))])
        if any(each[:2] != found[0][:2] for each in found):
            raise MismatchError(
                f"rank {self._hosting.rank} adds {len(mine)} numbers up over the ranks while others do something else. "
                "All ranks make the same calls in the same order: take none of them into an `if rank == 0:`."
            )
        rows = [each[2 : 2 + len(few)] for each in found]
        if len(mine) > len(few):
            more = self._ranks.exchange(mine[len(few) :])
            rows = [[*row, *rest] for row, rest in zip(rows, more, strict=True)]
        total = torch.zeros(len(mine), dtype=torch.float64, device="cpu")
        for row in rows:
            total += torch.tensor(row, dtype=torch.int64, device="cpu").view(torch.float64)
        return total.view(numbers.shape)

    def any(self, here: bool) -> bool:
        return any(each[0] for each in self._ranks.exchange([here]))

    # --------------------------------------------------------------------------------------------------- tied weights

    def share_owners(self, owners: list[Tensor]) -> list[Tensor]:
        """A parameter in use on any rank is in use on all that have it."""
        if not self._hosting.ties:
            return owners
        used = {id(owner) for owner in owners}
        mine = [id(copy) in used for copy in self._tied]
        found = self._ranks.exchange(mine)
        more = [
            copy
            for index, copy in enumerate(self._tied)
            if copy is not None and id(copy) not in used and any(each[index] for each in found)
        ]
        return [*owners, *more]

    def share_ties(self, tied: Sequence[Tensor | None]) -> None:
        """Write the owner's values into all copies of tied parameters."""
        for tie, copy in zip(self._hosting.ties, tied, strict=True):
            what = f"the values of '{tie.name}'"
            if copy is None:
                continue
            if self._hosting.rank == tie.owner:
                for rank in tie.holders[1:]:
                    self._ranks.send_one(rank, f"{self._series}/{what}", what, Message((copy.detach(),)))
                for rank in tie.holders[1:]:
                    self._finish(rank)
            else:
                (values,) = self._from(tie.owner, what).tensors
                assert values is not None  # as it was sent
                with torch.no_grad():
                    copy.copy_(values)

    def join_sums(self, parts: Sequence[Part]) -> dict[int, tuple[Tensor, Tensor]]:
        tied = {id(copy): index for index, copy in enumerate(self._tied) if copy is not None}
        found = joined([part for part in parts if id(part[1]) not in tied])
        waiting: dict[int, dict[int, Tensor]] = {}
        for stage, owner, grad in parts:
            if id(owner) in tied:
                waiting.setdefault(tied[id(owner)], {})[stage] = grad
        for index, copy in enumerate(self._tied):
            if copy is not None:
                whole = self._whole(index, waiting.get(index, {}))
                if whole is not None:
                    found[id(copy)] = (copy, whole)
        return found

    def _whole(self, index: int, mine: Mapping[int, Tensor]) -> Tensor | None:
        """The whole gradient of a tied parameter: the stages' sums, added in the order of the stages."""
        self._finish_all()
        tie = self._hosting.ties[index]
        here, rank_of = self._hosting.rank, self._hosting.rank_of
        stages = (-1, *[stage for stage, _ in tie.readers])  # -1: the loss, if it reads the parameter, on the last rank
        part, whole = f"a part of the gradient of '{tie.name}'", f"the gradient of '{tie.name}'"
        if here != tie.owner:
            own = tuple([mine.get(stage) for stage in stages if rank_of[stage] == here])
            self._ranks.send_one(tie.owner, f"{self._series}/{part}", part, Message(own))
            self._finish(tie.owner)
            return self._from(tie.owner, whole).tensors[0]
        sums: dict[int, Tensor | None] = dict(mine)
        for rank in tie.holders[1:]:
            theirs = [stage for stage in stages if rank_of[stage] == rank]
            sums.update(zip(theirs, self._from(rank, part).tensors, strict=True))
        total: Tensor | None = None
        for stage in stages:
            total = add_grads(total, sums.get(stage))
        for rank in tie.holders[1:]:
            self._ranks.send_one(rank, f"{self._series}/{whole}", whole, Message((total,)))
        for rank in tie.holders[1:]:
            self._finish(rank)
        return total


def _bits(value: Tensor | None) -> int:
    return 0 if value is None else _as_bits(value.item())


def _as_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
