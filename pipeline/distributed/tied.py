"""Tied parameters: copies on several ranks of one parameter, with the same values and one whole gradient.

    the owner, the rank of the first stage that reads it  --values-->  all copies, when the Pipe is built
    copies  --the stages' sums-->  the owner adds them in the order of the stages  --whole gradient-->  all copies
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pipeline.data.pytrees import add_grads
from pipeline.distributed.agreement import MismatchError, digest, values_in_words
from pipeline.distributed.assignment import StageAssignment, TiedParameter
from pipeline.distributed.digests import Sketches
from pipeline.distributed.exchange import CallMessages
from pipeline.execution.communicator import Gradients, Pair, StageGrad, joined_by_owner
from pipeline.transports.message import Message


class TiedGradients(Gradients):
    """Whole gradients over the ranks: of the parameters that several have, their copies'.

    Args:
        assignment: says which parameters are tied, and where.
        copies: this rank's copies of them. Empty: none is built yet.
        messages: those of the call.
    """

    def __init__(
        self, assignment: StageAssignment, copies: Mapping[TiedParameter, Tensor], messages: CallMessages
    ) -> None:
        self.copies = copies
        self._assignment = assignment
        self._messages = messages
        self._ranks = messages.ranks

    def check_copies(self) -> None:
        """Raise if copies of a tied parameter are no longer the same.

        Raises:
            MismatchError: it names the parameter.
        """
        self.check_alike(
            lambda copy: f"{values_in_words([copy])} {copy.requires_grad}",
            "the tied parameter {0} has other values, or another requires_grad, on rank {1[0]} than on another of "
            "ranks {1}. Change it on all of them alike: give it to the optimizer of each, with the same settings. Find "
            "it by its name in pipe.named_parameters(): by number, as in pipe[0], other ranks have a placeholder."
        )

    def check_alike(self, words: Callable[[Tensor], str], error: str) -> None:
        own_digests = {tied.name: digest(words(copy)) for tied, copy in self.copies.items()}
        digests = self._ranks.exchange(own_digests) if self._assignment.tied_parameters else []
        for tied in self._assignment.tied_parameters:
            if len({digests[rank].get(tied.name) for rank in tied.holders}) > 1:
                names = " = ".join(dict.fromkeys(f"'{name}'" for _, name in tied.readers))
                raise MismatchError(error.format(names, list(tied.holders)))

    def share_values(self, copies: Mapping[TiedParameter, Tensor]) -> None:
        """Write the owner's values into all copies of tied parameters."""
        self._ranks.connect(self._assignment.tied_pairs)
        for tied, copy in copies.items():
            name = f"the values of '{tied.name}'"
            if self._ranks.rank == tied.owner:
                self._messages.send(tied.holders[1:], name, Message((copy.detach(),)))
            else:
                (values,) = self._messages.receive(tied.owner, name).tensors
                assert values is not None  # as it was sent
                with torch.no_grad():
                    copy.copy_(values)

    def join(self, parts: Sequence[StageGrad]) -> dict[int, Pair]:
        self._ranks.connect(self._assignment.tied_pairs)
        copies = set(map(id, self.copies.values()))
        pairs = joined_by_owner([part for part in parts if id(part[1]) not in copies])
        for tied, copy in self.copies.items():
            whole = self._whole(tied, {stage: grad for stage, owner, grad in parts if owner is copy})
            if whole is not None:
                pairs[id(copy)] = (copy, whole)
        return pairs

    def shared(self, pairs: dict[int, Pair]) -> dict[int, Pair]:
        """The tensor of the first rank that gives one for its copy, and no zeros, goes to all copies."""
        if not self._assignment.tied_parameters:
            return pairs
        own_rank, rank_of = self._assignment.rank, self._assignment.rank_of
        nonzero = {key: tensor for key, (_, tensor) in pairs.items() if bool(tensor.any())}
        rows = self._ranks.exchange([tied.name for tied, copy in self.copies.items() if id(copy) in nonzero])
        parts = []
        for tied, copy in self.copies.items():
            if [rank for rank in tied.holders if tied.name in rows[rank]][:1] == [own_rank]:
                stage = next(stage for stage, _ in tied.readers if rank_of[stage] == own_rank)
                parts.append((stage, copy, nonzero[id(copy)]))
        whole = self.join(parts)
        for tied, copy in self.copies.items():
            if id(copy) in nonzero:
                own, theirs = Sketches([nonzero[id(copy)], whole[id(copy)][1]]).values
                if not own.is_like(theirs):
                    raise MismatchError(
                        f"the second backward begins with other gradients at the gradient of the tied parameter "
                        f"'{tied.name}' on rank {own_rank} than on another of ranks {list(tied.holders)}: {own}; "
                        f"{theirs}. Its gradient is the same on all of them and counts once: compute the same from it "
                        "on each, or leave it out on all but one."
                    )
        return {**pairs, **whole}

    def _whole(self, tied: TiedParameter, own_sums: Mapping[int, Tensor]) -> Tensor | None:
        """The whole gradient of a tied parameter: the stages' sums, added in the order of the stages."""
        own_rank, rank_of = self._assignment.rank, self._assignment.rank_of
        stages = (-1, *[stage for stage, _ in tied.readers])  # -1: the loss, if it reads it, on the last rank
        part_name, whole_name = f"a part of the gradient of '{tied.name}'", f"the gradient of '{tied.name}'"
        if own_rank != tied.owner:
            own_parts = tuple([own_sums.get(stage) for stage in stages if rank_of[stage] == own_rank])
            self._messages.send([tied.owner], part_name, Message(own_parts))
            return self._messages.receive(tied.owner, whole_name).tensors[0]
        sums: dict[int, Tensor | None] = dict(own_sums)
        for rank in tied.holders[1:]:
            holder_stages = [stage for stage in stages if rank_of[stage] == rank]
            sums.update(zip(holder_stages, self._messages.receive(rank, part_name).tensors, strict=True))
        total: Tensor | None = None
        for stage in stages:
            total = add_grads(total, sums.get(stage))
        self._messages.send(tied.holders[1:], whole_name, Message((total,)))
        return total
