"""The topology of a Pipe over ranks: its name, and the assignment of its stages.

    module, balance, schedule  -->  StageAssignment: the rank of each stage, tied parameters
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn

from partition.names import first_names_of, last_places, sequential
from pipeline.common.cadence import Cadence
from pipeline.common.module_tables import modules_of, tables_of
from pipeline.distributed.assignment import StageAssignment, TiedParameter, assign
from pipeline.distributed.group import RankGroup
from pipeline.distributed.remote_layer import RemoteLayer
from pipeline.execution.communicator import Topology


class PipeTopology(Topology):
    """A Pipe's ranks, and what each of them has.

    Args:
        stages: the whole module's, of which only the structure is needed.
        rank_of: the rank of each stage.
        ranks: the ranks.

    Attributes:
        ranks: the ranks.
        name: of the Pipe, by its number among those that run on these ranks.
        assignment: the assignment of stages.
        first_names: for every name of a parameter of the whole module its first one, in the order of the module.
        places: of all that is in it, by name, as from `last_places`: what joins a module later stands behind that.
        nothing: an empty one, for a rank without any.
        opened: the calls of the Pipe, by entry point and failures before.
    """

    def __init__(self, stages: Sequence[nn.Sequential], rank_of: Sequence[int], ranks: RankGroup) -> None:
        self.ranks = ranks
        self.name = f"Pipe {ranks.pipes}"
        self.assignment: StageAssignment = assign(stages, rank_of, ranks.rank)
        self.nothing: nn.Parameter = nn.Parameter(torch.empty(0, device="cpu"))
        self.opened = Cadence()
        whole = sequential({name: layer for stage in stages for name, layer in stage._modules.items()})
        self.first_names: Mapping[str, str] = first_names_of(whole)
        self.places: Mapping[str, int] = last_places(whole._modules)
        self._holders = defaultdict[str, set[int]](set)  # by first names: the ranks that have the parameter
        for stage, rank in zip(stages, rank_of, strict=True):
            for name, _ in stage.named_parameters():
                self._holders[self.first_names[name]].add(rank)
        # Of this rank's own no weak reference: torch cannot move a parameter in place that has one (moved_in_place).
        own_references = {
            id(parameter): partial(table.get, name)
            for stage, rank in zip(stages, rank_of, strict=True)
            if rank == ranks.rank
            for table in tables_of(stage.modules(), "_parameters")
            for name, parameter in table.items()
        }
        # The first names of the whole module's parameters, by id, and what gives these, if they exist.
        self._named_references: dict[int, tuple[str, Callable[[], Tensor | None]]] = {
            id(parameter): (name, own_references.get(id(parameter)) or ref(parameter))
            for name, parameter in whole.named_parameters()
        }
        self._remote_modules = [
            ref(module) for stage, rank in zip(stages, rank_of, strict=True) if rank != ranks.rank
            for module in stage.modules()
        ]

    def __deepcopy__(self, memo: Any) -> PipeTopology:
        """A copy of a Pipe runs on the same ranks, by another name: not on one while others run the Pipe itself."""
        topology = copy.copy(self)
        topology.name = f"a copy of {self.name}"
        return topology

    def has(self, stage: int) -> bool:
        return self.assignment.rank_of[stage] == self.assignment.rank

    def name_of(self, leaf: Tensor) -> str | None:
        """The first name of a parameter of the module. None: it is none."""
        name, reference = self._named_references.get(id(leaf), (None, None))
        return name if reference is not None and reference() is leaf else None

    def is_elsewhere(self, leaf: Tensor) -> bool:
        name = self.name_of(leaf)
        return name is not None and self.assignment.rank not in self._holders[name]

    def refuse_external(self, leaves: Iterable[Tensor], who: str, stage: int | None = None) -> None:
        for leaf in leaves:
            name = self.name_of(leaf)
            if name is not None and stage is not None and self._holders[name] == {self.assignment.rank}:
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

    def check_ties(
        self,
        originals: Mapping[TiedParameter, Tensor],
        copies: Mapping[TiedParameter, Tensor],
        stages: Sequence[Sequence[nn.Module]],
    ) -> None:
        """Raise if ties between ranks were made or cut: the others, who see their own layers alone, would not know.

        Args:
            originals: this rank's copies of tied parameters, as the Pipe was built; held, so that none gets their ids.
            copies: as they are now.
            stages: the layers of all stages, as they are now.

        Raises:
            RuntimeError: one was made or cut.
        """
        by_stage = {
            stage: {id(parameter): parameter for layer in stages[stage] for parameter in layer.parameters()}
            for stage in self.assignment.own_stages
        }
        for tied, original in originals.items():
            readers = {stage for stage, parameters in by_stage.items() if id(original) in parameters}
            if copies.get(tied) is not original or readers != {stage for stage, _ in tied.readers if stage in by_stage}:
                _refuse_tie(tied.name, "in this rank's layers was replaced, or tied to one more,")
        joined: set[int] = set()  # the parameters that this rank's layers have got since, by id
        for parameter in [parameter for parameters in by_stage.values() for parameter in parameters.values()]:
            name = self.name_of(parameter)
            if name is None:
                joined.add(id(parameter))
            elif self.assignment.rank not in self._holders[name]:
                _refuse_tie(name, "of another rank's layer was put into one of this rank's")
        modules = modules_of([module for held in self._remote_modules if joined and (module := held()) is not None])
        for parameter in [shared for table in tables_of(modules, "_parameters") for shared in table.values()]:
            if id(parameter) in joined:
                layers = [layer for stage in by_stage for layer in stages[stage]]
                name = next(name for layer in layers for name, own in layer.named_parameters() if own is parameter)
                _refuse_tie(name, "joined this rank's layers and another rank's")

    def named(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], remove_duplicate: bool
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the names of the whole module, in the order in which they are found.

        Args:
            named_parameters: by the names of the layers that this rank has, each once.
            remove_duplicate: a tied one by its first name alone, though another rank has that layer; else by all.
        """
        by_name: dict[str, nn.Parameter] = {}
        for name, parameter in named_parameters:
            first = self.first_names.get(name, name)
            by_name[name if first in by_name else first] = parameter  # one that was untied since has a name of its own
        names = {name: [name] for name in by_name}
        for name, first in [] if remove_duplicate else self.first_names.items():
            if name not in by_name and first in by_name:
                names[first].append(name)
        return ((name, by_name[key]) for key, key_names in names.items() for name in key_names)

    def elsewhere(self, stages: Sequence[nn.Sequential]) -> Iterator[tuple[str, nn.Module]]:
        """The placeholders of other ranks' layers, by their names."""
        own_stages = [stages[stage] for stage in self.assignment.own_stages]
        here = {id(module) for stage in own_stages for layer in stage for module in layer.modules()}
        index = 0
        for stage, rank in enumerate(self.assignment.rank_of):
            layers: Mapping[str, Any] = stages[stage]._modules
            for name, layer in layers.items():
                if rank != self.assignment.rank:
                    yield name, RemoteLayer(layer, index, stage, rank, here)
                index += 1


def _refuse_tie(name: str, change: str) -> NoReturn:
    raise RuntimeError(
        f"parameter '{name}' {change} after the Pipe was built. Over ranks ties are those that it was built with, and "
        "load_state_dict(assign=True) cuts them: change the model first, and build the Pipe anew."
    )
