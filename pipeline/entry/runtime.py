"""The part of a Pipe on which analyses build: the assignment of stages, and the settings of a call.

    pipe.runtime  -->  topology, ranks, tied parameters           the assignment of stages
                  -->  communicator("curvature")                  within it a failure on one rank fails all
                  -->  setup(batch, target, communicator, options)       for a call that runs the schedule of a step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from pipeline.data.microbatch import Batch
from pipeline.distributed.assignment import TiedParameter
from pipeline.distributed.topology import PipeTopology
from pipeline.execution.communicator import Communicator
from pipeline.execution.setup import Setup

NewSetup: TypeAlias = Callable[[Batch, Batch, Communicator, Mapping[str, object]], Setup]


@dataclass(frozen=True)
class Runtime:
    """The interface of a Pipe for code that runs its own calls over the stages, such as `pipeline.curvature`.

    Attributes:
        module: the Pipe.
        topology: the assignment of stages to ranks. None: all stages are in this process.
        has_replicas: whether other pipelines train the same stages on other mini-batches.
        stages: gives the layers of each stage, as they are now; a ValueError if their number has changed.
        communicator: gives the processes that run one operation of this name, a context.
        setup: (the input, the target, who runs it, options) -> what a call with gradients needs, which runs the order
            of a step, seeds nothing, and keeps nothing for later. Over ranks all have agreed to make it.
    """

    module: nn.Module
    topology: PipeTopology | None
    has_replicas: bool
    stages: Callable[[], Sequence[Sequence[nn.Module]]]
    communicator: Callable[[str], Communicator]
    setup: NewSetup

    @property
    def rank(self) -> int:
        """The number of this process among the Pipe's."""
        return 0 if self.topology is None else self.topology.ranks.rank

    @property
    def ranks(self) -> int:
        """The number of the Pipe's processes."""
        return 1 if self.topology is None else self.topology.ranks.size

    @property
    def first_names(self) -> Mapping[str, str]:
        """Over ranks, for every name of a parameter of the whole model its first one; else empty."""
        return {} if self.topology is None else self.topology.first_names

    def tied(self) -> list[tuple[TiedParameter, Tensor | None]]:
        """The parameters that several ranks have, each with this rank's copy; None where it has none."""
        if self.topology is None:
            return []
        hosting = self.topology.hosting
        return list(zip(hosting.ties, hosting.tied(self.module), strict=True))
