"""The replicas of a pipeline: the processes that have the same stages, and begin with the values of the first.

    mesh of 2 pipelines x 2 ranks       pipeline 0   rank 0 - rank 1       group=mesh["pp"]      one pipeline
                                                       |        |
                                        pipeline 1   rank 2 - rank 3       replicas=mesh["dp"]   same stages, other data

Of its replicas a process knows those that have its own stages. Replica 0's initial values count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pipeline.common.arguments import check_group
from pipeline.distributed.agreement import MismatchError, difference, digest, shapes_in_words
from pipeline.distributed.exchange import CallMessages
from pipeline.distributed.group import RankGroup, ranks_of
from pipeline.transports.message import Message


class Replicas:
    """A Pipe's replicas, as one process sees them.

    Args:
        ranks: one for each replica: those that have the same stages as this process.
        pipeline: the ranks that run a replica together. None: one process does.

    Attributes:
        number: of the Pipe among those on these ranks.
    """

    def __init__(self, ranks: RankGroup, pipeline: RankGroup | None) -> None:
        self.ranks = ranks
        self.pipeline = pipeline
        self.number = ranks.pipes

    def join(self, module: nn.Module, settings: str) -> None:
        """Join the replicas into one Pipe: check that all are set up alike, and take replica 0's values.

        Args:
            module: what this process has of the model.
            settings: how the Pipe is set up, in words; its parameters, too.

        Raises:
            MismatchError: they are not set up alike.
        """
        ranks, call = self.ranks, f"Pipe {self.number} among the replicas"
        ranks.enter(call)
        try:
            descriptions = {
                "the Pipes": f"number {self.number} among the replicas",
                "the places in the pipeline": _place(self.pipeline),
                "the settings": settings,
                "the buffers": shapes_in_words(module.named_buffers()),
            }
            digests = [digest(text) for text in descriptions.values()]
            if any(theirs != digests for theirs in ranks.exchange(digests)):
                refuse(ranks, descriptions)
            if self.pipeline is not None:  # else devices were given
                ranks.refuse_shared_devices()
            self._share([*module.parameters(), *module.buffers()])
            ranks.exchange_alike("has joined the replicas", None)
            ranks.pipes += 1
        except BaseException as error:
            ranks.fail(error, call)
        ranks.leave()

    def _share(self, tensors: Iterable[Tensor]) -> None:
        """Write replica 0's values into the tensors of all replicas."""
        messages = CallMessages(self.ranks, f"{self.number}")
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            message = Message((tensor.detach(),)) if self.ranks.rank == 0 else None
            (value,) = messages.broadcast(0, "the initial values", message).tensors
            if message is None:
                assert value is not None  # as it was sent
                with torch.no_grad():
                    tensor.copy_(value)


def check_where(replicas: Any, group: Any, devices: Any) -> None:
    """Raise if replicas are given, but neither ranks nor devices say where the stages are.

    Raises:
        ValueError: neither its ranks nor devices are given.
    """
    if replicas is not None and group is None and devices is None:
        raise ValueError(
            "replicas=... says who has the same stages, but nothing says where the stages are. Give group=..., the "
            'ranks of one pipeline (with a DeviceMesh: group=mesh["pp"], replicas=mesh["dp"]), or devices=[...] for '
            "all stages in this process."
        )


def find_replicas(group: Any, ranks: RankGroup | None, heartbeat: float, timeout: float) -> RankGroup | None:
    """The ranks of the replicas, those that have the same stages as this one.

    Args:
        group: a ProcessGroup, a DeviceMesh of one dimension, or None.
        ranks: those that run this replica. None: this process does.
        heartbeat, timeout: seconds, see RankGroup.

    Returns:
        None: there is one replica.

    Raises:
        ValueError: other ranks of this pipeline are among them.
    """
    if group is None:
        return None
    check_group(group, "replicas")
    replicas = ranks_of(group, heartbeat, timeout)
    if replicas is not None and ranks is not None:
        common = sorted(set(replicas.members) & set(ranks.members))
        if len(common) > 1:
            raise ValueError(
                f"replicas has ranks {replicas.members} and group has ranks {ranks.members}, so ranks {common} would "
                "be replicas of each other and parts of one pipeline. Give the two dimensions of a DeviceMesh: "
                'group=mesh["pp"], replicas=mesh["dp"].'
            )
    return replicas


def refuse(ranks: RankGroup, descriptions: Mapping[str, str]) -> NoReturn:
    """Exchange descriptions with the other replicas, and raise what differs. All replicas call this.

    Raises:
        MismatchError: in words.
    """
    by_rank = ranks.exchange(dict(descriptions))
    raise MismatchError(
        f"the replicas of a Pipe (ranks {ranks.members} of the world, here 0 to {ranks.size - 1}) do not do the same: "
        f"{difference(by_rank)}. All replicas run the same script, each with mini-batches of its own."
    )


def _place(pipeline: RankGroup | None) -> str:
    return "all stages in one process" if pipeline is None else f"rank {pipeline.rank} of {pipeline.size}"
