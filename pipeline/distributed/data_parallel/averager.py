"""The averager of one call of a replica: its gradients on their way to the means over all replicas.

    settled    a stage's own gradients are final: they leave, bucket by bucket
    average    the rest, the divisor, and digests of what must be alike  -->  means, in the order of the modules
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pipeline.data.loss import divide_
from pipeline.distributed.agreement import LOADS, MODES, OPTIONS, SETTINGS, digest
from pipeline.distributed.data_parallel.gradient_means import GradientReducer, among_replicas
from pipeline.distributed.data_parallel.replicas import Replicas, refuse
from pipeline.distributed.data_parallel.shards import BucketLayout, GradientBucket, with_external
from pipeline.execution.communicator import Averager, Pair

_ALIKE = (SETTINGS, MODES, LOADS, OPTIONS)  # of what a call's ranks agree on, what replicas must agree on, too


class ReplicaAverager(Averager):
    """The means of one call's gradients.

    Args:
        replicas: the replicas.
        layout: what travels between them.
        calls: the call, in words.
        descriptions: of what the replicas must agree on, where the call is a backward: those of its forward.

    Attributes:
        waits_for_vote: all replicas are still to say that their means are there.
        is_agreed: they have.
    """

    def __init__(
        self, replicas: Replicas, layout: BucketLayout, calls: str, descriptions: Mapping[str, str] | None = None
    ) -> None:
        self.layout = layout
        self.waits_for_vote = False
        self.is_agreed = False
        self.descriptions = {**(descriptions or {}), "the calls": calls}
        self._replicas = replicas
        self._reducer: GradientReducer | None = None
        self._final_pairs: dict[int, Sequence[Pair]] = {}  # by stage

    def describe(self, descriptions: Mapping[str, str]) -> None:
        """Take descriptions of a call: what replicas must agree on is compared when their gradients meet."""
        self.descriptions.update({name: descriptions[name] for name in _ALIKE if name in descriptions})

    def settled(self, stage: int, pairs: Sequence[Pair]) -> None:
        """Send what is final, in the order of the buckets."""
        self._final_pairs[stage] = pairs
        reducer = self._begun()
        while len(reducer.unsent) > 1 and self._final_pairs.keys() >= set(reducer.unsent[0].stages):
            reducer.send(_by_id(pair for stage in reducer.unsent[0].stages for pair in self._final_pairs[stage]))

    def average(self, pairs: list[Pair], divisor: Tensor | None, waits: bool = False) -> list[Pair]:
        """Make whole gradients the means over the replicas.

        Raises:
            MismatchError: the replicas do not make the same call.
        """
        reducer, self._reducer = self._begun(), None
        last, grads = with_external(self.layout, pairs), _by_id(pairs)
        reducer.buckets[-1] = last
        while reducer.unsent:
            reducer.send(grads)
        sums = reducer.receive()
        descriptions = {**self.descriptions, "the parameters": self._parameters_in_words(last)}
        row = [digest("\0".join(descriptions.values())), None if divisor is None else divisor.item()]
        with among_replicas():
            rows = self._replicas.ranks.exchange(row)
            if any(theirs != row[0] for theirs, _ in rows):
                refuse(self._replicas.ranks, descriptions)
        means = reducer.means(sums, [
            None if number is None else torch.tensor(number, dtype=torch.float64, device="cpu") for _, number in rows
        ])
        self.waits_for_vote = not waits
        if waits:
            with among_replicas():
                self._replicas.ranks.exchange(row[:1])
            self.is_agreed = True
        ids = {id(owner) for owner, _ in means}
        others = [(owner, divide_(grad, divisor)) for owner, grad in pairs if id(owner) not in ids]  # no parameters
        return [*self._in_order(means), *others]

    def _in_order(self, pairs: Sequence[Pair]) -> list[Pair]:
        """In the order of the modules, as without replicas, whatever travelled first."""
        order = {id(parameter): index for index, parameter in enumerate(self.layout.parameters)}
        return sorted(pairs, key=lambda pair: order.get(id(pair[0]), len(order)))

    def _parameters_in_words(self, last: GradientBucket) -> str:
        """The parameters, trained or frozen, and those of the last bucket that are not the module's."""
        lines = [
            f"parameter {index} of shape {list(leaf.shape)} is {'trained' if leaf.requires_grad else 'frozen'}"
            for index, leaf in enumerate(self.layout.parameters)
        ]
        external = last.parameters[len(self.layout.buckets[-1].parameters) :]
        lines += [f"a parameter of shape {list(leaf.shape)} that is not the module's" for leaf in external]
        return "\n".join(lines)

    def _begun(self) -> GradientReducer:
        if self._reducer is None:
            replicas = self._replicas
            self._reducer = GradientReducer(replicas.ranks, str(replicas.number), self.layout.buckets)
        return self._reducer


def _by_id(pairs: Iterable[Pair]) -> dict[int, Tensor]:
    return {id(owner): grad for owner, grad in pairs}
