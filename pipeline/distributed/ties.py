"""The ties between ranks, which stay as they were when the Pipe was built.

    model[3].weight = model[0].weight; Pipe(model, ...)           a copy on each rank, one gradient
    later, on rank 1: model[3].weight = nn.Parameter(...)         error: the copies would still get one gradient
                      model[2].weight = model[0].weight           error: rank 0 would not know of it

A rank sees its own layers alone, so none could tell the others what was tied or cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pipeline.distributed.topology import PipeTopology


class Ties:
    """A rank's copies of tied parameters.

    They are kept, since the number of one that is gone may be another's; of a copy of the Pipe they are its copies.

    Args:
        topology: of the Pipe.
        copies: this rank's copy of each tied parameter, None where it has none.
    """

    def __init__(self, topology: PipeTopology, copies: Sequence[Tensor | None]) -> None:
        assignment = topology.assignment
        tied = [parameter for parameter in assignment.tied_parameters if assignment.rank in parameter.holders]
        self._topology = topology
        self._copies = copies
        self._names = {topology.first_names[parameter.name] for parameter in tied} | topology.own_names

    def check(self, copies: Sequence[Tensor | None], stages: Sequence[Sequence[nn.Module]]) -> None:
        """Look at what this rank's stages hold now.

        Args:
            copies: as above, as they are now.
            stages: the layers of all stages.

        Raises:
            RuntimeError: a tie between ranks was made or cut.
        """
        assignment = self._topology.assignment
        by_stage = {
            stage: {id(parameter): parameter for layer in stages[stage] for parameter in layer.parameters()}
            for stage in assignment.own_stages
        }
        for tied, copy, original in zip(assignment.tied_parameters, copies, self._copies, strict=True):
            readers = {stage for stage, _ in tied.readers}
            if copy is not original or any(
                (id(original) in by_stage[stage]) != (stage in readers) for stage in by_stage
            ):
                self._refuse(tied.name, "in this rank's layers was replaced, or tied to one more,")
        for parameter in (parameter for parameters in by_stage.values() for parameter in parameters.values()):
            name = self._topology.name_of(parameter)
            if name is not None and name not in self._names:
                self._refuse(name, "of another rank's layer was put into one of this rank's")

    def _refuse(self, name: str, change: str) -> None:
        raise RuntimeError(
            f"parameter '{name}' {change} after the Pipe was built. Over ranks ties are those that it was built with, "
            "and load_state_dict(assign=True) cuts them: change the model first, and build the Pipe anew."
        )
