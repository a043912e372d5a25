"""The parameters of a stage as leaves of one call (aliases), and the check that their values stay as they were.

    module._parameters["weight"] = p      taken out while the stage computes; an alias stands in its place:
    nn.Parameter(p.detach())              a leaf of its own on p's memory, version counter shared
    alias.grad                            the stage's sum over chunks, added to as each gradient is computed; float32
                                          for parameters of half precision, whose sums would round at every chunk

So the parameters themselves see one whole gradient per backward pass. They are read from the modules at each call; a
swap (swap.py) puts back what it found. A frozen parameter has an alias too, so that freezing it later changes nothing.

A parameter that an earlier stage at another place reads too (tied weights) belongs to that place. Here its alias is a
copy, made in each call, whose gradient goes to the owner's place when the call adds up its sums. Cached copies would
save the transfer, but would need a coherence protocol.

Without aliases, with the parameters' own `.grad` emptied around each chunk, hooks and DistributedDataParallel would see
a gradient per chunk. Sums in half precision would lose one part in a hundred over 64 chunks of bfloat16; these are
rounded once, when they reach the parameter. Nothing is kept between calls, so `functional_call`,
`load_state_dict(assign=True)` and `requires_grad_` mean what they mean on the plain module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from partition.contents import with_attributes
from partition.names import sequential
from partition.precision import HALF
from pipeline.common.errors import CheckpointError
from pipeline.common.graph import StrayGradientGuard, leaf_nodes, leaves_at, mark
from pipeline.common.module_tables import ModuleTable, tables_of
from pipeline.data.pytrees import checksums, same_checksums, share_memory, versions
from pipeline.stage.swap import ParameterTables, Swap

# A parameter of the modules; itself, or its copy at this place; and the alias on the memory of that.
AliasRow: TypeAlias = tuple[Tensor, Tensor, Tensor]


class Aliases:
    """The parameters of one stage during one call.

    Args:
        modules: the modules of the stage.
        layers: its layers, by their index in the Sequential.
        stage: how errors name the stage.
        guard: refuses gradients that another backward brings.
        compares: whether to check for parameters that a forward wrote without their version counters, and to guard
            every alias from the beginning.
        bring: from parameters to their values at this place: themselves, or copies.
        grad: whether the call has gradients. Without, only parameters of other places need an alias.
        wanted: the ids of the parameters whose gradients are wanted, of those that require one. None: all.

    Attributes:
        ends: the nodes of the graph at which aliases stand that an output depends on. Autograd makes them anew for each
            graph unless something keeps them.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        layers: Sequence[tuple[int, nn.Module]],
        stage: str,
        guard: StrayGradientGuard,
        compares: bool,
        bring: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        grad: bool,
        wanted: Container[int] | None = None,
    ) -> None:
        tables: list[tuple[nn.Module, ModuleTable]] = []
        reals: dict[int, Tensor] = {}
        for module, table in zip(modules, tables_of(modules, "_parameters")):
            if table and (registered := [real for real in table.values() if real is not None]):
                tables.append((module, table))
                reals.update(zip(map(id, registered), registered))
        rnns = [vars(module) for module, _ in tables if isinstance(module, nn.RNNBase)]
        local = dict(zip(reals, bring(list(reals.values()))))
        if not grad:  # parameters of this place stay where they are
            reals = {key: real for key, real in reals.items() if local[key] is not real}
            tables = [pair for pair in tables if not reals.keys().isdisjoint(map(id, pair[1].values()))]
        aliases: dict[int, Tensor] = {}
        self._trained: dict[int, tuple[Tensor, Tensor]] = {}  # by the alias's id: parameter, alias
        description = f"a parameter of {stage}"
        for key, real in reals.items():
            trains = real.requires_grad and (wanted is None or key in wanted)
            aliases[key] = alias = _alias(real, local[key], trains, description)
            if trains:
                self._trained[id(alias)] = real, alias
        self._layers = layers
        self._stage = stage
        self._rows = list(zip(reals.values(), [local[key] for key in reals], aliases.values(), strict=True))
        # As the call begins: of the parameters (an alias of one at this place has the same), and of aliases of copies.
        self._versions = versions(self._reals), versions([row[2] for row in self._rows if row[1] is not row[0]])
        self._modules = [module for module, _ in tables]
        self._tables = ParameterTables.of([  # of these modules
            (table, {name: aliases.get(id(real), real) for name, real in table.items()}) for _, table in tables
        ], rnns)
        self._used: set[int] = set()
        self.ends: set[Any] = set()
        self._guard = guard
        self._separate_sums: int | None = None  # the number of sums that have memory of their own, while there are any
        if compares:
            self._guard_aliases([alias for _, alias in self._trained.values()])
        self._sums = checksums(list(aliases.values())) if compares else []

    def __contains__(self, leaf: int) -> bool:
        return leaf in self._trained

    def learn(self, nodes: Sequence[Any]) -> dict[int, Tensor]:
        """Note the aliases that a chunk's graph reaches. Returns its other leaves, by id.

        Args:
            nodes: of the graph, down to `ends`.
        """
        leaves = leaf_nodes(nodes)  # in most chunks but the first there are none
        alias_nodes = [node for node in leaves if id(node.variable) in self._trained]
        self.ends.update(alias_nodes)
        self._used.update([id(node.variable) for node in alias_nodes])
        others = leaves_at([node for node in leaves if node not in self.ends])
        if others:
            self._check_flags()
        return others

    @property
    def _reals(self) -> list[Tensor]:
        return [real for real, _, _ in self._rows]

    @property
    def _copies(self) -> list[AliasRow]:
        """The rows of parameters that another place owns."""
        return [row for row in self._rows if row[1] is not row[0]] if self._versions[1] else []

    @property
    def owners(self) -> set[int]:
        """The ids of the real parameters."""
        return set(map(id, self._reals))

    @property
    def used(self) -> list[Tensor]:
        """The aliases that an output depends on."""
        return [alias for key, (_, alias) in self._trained.items() if key in self._used]

    @property
    def used_parameters(self) -> list[Tensor]:
        """The real parameters that an output depends on, in the order of the modules."""
        return [real for key, (real, _) in self._trained.items() if key in self._used]

    @property
    def trained(self) -> list[tuple[Tensor, Tensor]]:
        """(real parameter, alias) of all whose gradients are wanted, each once, in the order of the modules."""
        return list(self._trained.values())

    def stand_in(self) -> Swap:
        """Within: the aliases stand in the modules."""
        return Swap(self._tables, self._changed)

    def stand_back(self, views: dict[int, Tensor]) -> Swap:
        """Within: `views` of the real parameters (by their ids) stand in the modules."""
        stand_ins: dict[int, Tensor] = {}  # by alias
        for real, _, alias in self._rows:
            view = views.get(id(real), alias)
            stand_ins[id(alias)] = view if view.device == alias.device else view.to(alias.device)
        pairs = [
            (table, {name: stand_ins.get(id(alias), alias) for name, alias in aliases.items()})
            for table, aliases in zip(self._tables.tables, self._tables.stand_ins)
        ]
        return Swap(ParameterTables.of(pairs, self._tables.rnns), self._changed)

    # -------------------------------------------------------------------------------------------------------- sums

    def begin_sums(self) -> None:
        """Begin a backward of the stage, unless one is under way.

        Raises:
            RuntimeError: another backward has brought a gradient.
        """
        if self._separate_sums is None:
            self._separate_sums = -1
            if any([alias.grad is not None for _, alias in self._trained.values()]):
                self._guard()

    def end_sums(self) -> None:
        """End a backward of the stage: sums get memory of their own, before others are added to them in place.

        Autograd takes a first gradient as it is, whoever else has its memory (github.com/pytorch/pytorch/issues/34082):
        another parameter has that of torch.stack([u, w]).sum(0), the stage before that of x + u.view(1, -1).
        """
        if self._separate_sums is not None and len(self._used) > self._separate_sums:
            sums = [(alias, grad) for _, alias in self._trained.values() if (grad := alias.grad) is not None]
            self._separate_sums = len(sums)
            for (alias, grad), shares in zip(sums, share_memory([grad for _, grad in sums])):
                if shares:
                    alias.grad = grad.clone()

    def take_sums(self) -> list[tuple[Tensor, Tensor]]:
        """(Parameter, this stage's sum over chunks) of all that have one; forgets the sums.

        An alias that some graph still holds is guarded from now on.
        """
        self._separate_sums = None
        self.ends.clear()  # each holds its alias
        sums = [(real, grad) for real, alias in self._trained.values() if (grad := alias.grad) is not None]
        for _, alias in self._trained.values():
            alias.grad = None
        referenced = self._referenced
        self._guard.is_needed = bool(referenced)
        self._guard_aliases(referenced)
        return sums

    @property
    def are_held(self) -> bool:
        """Whether a graph held an alias when the sums were taken last."""
        return self._guard.is_needed

    @property
    def _referenced(self) -> list[Tensor]:
        """The aliases that something holds besides Python: a graph, or a view."""
        aliases: list[Any] = [alias for _, alias in self._trained.values()]  # torch's stub lacks _use_count
        return [alias for alias in aliases if alias._use_count() > 1]

    def _guard_aliases(self, aliases: Sequence[Tensor]) -> None:
        for alias in aliases:  # as registering a hook does, in less time
            alias._post_accumulate_grad_hooks = OrderedDict({self._guard: self._guard})

    def release(self) -> None:
        """Drop the aliases, and with them the copies."""
        self.ends.clear()
        self._guard_aliases(self._referenced)
        self._rows, self._versions = [], ((), ())
        self._tables = ParameterTables.of((), ())
        self._trained.clear()

    # ------------------------------------------------------------------------------------------------------ checks

    def check_versions(self, chunk: int) -> None:
        """Raise if a parameter was written since F."""
        self._check_copies()
        for (real, _, alias), then, now in self._written():
            raise CheckpointError(
                f"parameter '{self._name_of(alias)}' (shape {list(real.shape)}) of {self._stage} was changed in "
                f"place between the forward and the recomputation of chunk {chunk}: it is at version {now}, expected "
                f"version {then}. Step the optimizer after backward(). "
                "If a layer writes it within its forward (nn.Embedding(max_norm=...), an initialisation from the "
                "first data), use checkpoint='never', or let it write before: torch.no_grad() around "
                "pipe.to_sequential()(x)."
            )

    def check_memory(self) -> None:
        """Raise if a forward set what only an alias got, or wrote a parameter past its version counter."""
        self._check_copies([id(row[2]) for row, _, _ in self._written()] if self._copies else ())
        self._check_flags()
        for _, local, alias in self._rows:
            is_strided = alias.layout is local.layout is torch.strided
            if alias.layout is not local.layout or is_strided and alias.data_ptr() != local.data_ptr():
                raise RuntimeError(
                    f"parameter '{self._name_of(alias)}' of {self._stage} got new data within the forward (param.data "
                    "= ...). Write it in place before the forward, in a torch.no_grad() block."
                )
        if not self._sums or versions(self._reals) != self._versions[0]:
            return
        if not same_checksums(self._sums, checksums([alias for _, _, alias in self._rows])):
            raise CheckpointError(
                f"a forward of {self._stage} wrote a parameter through .data, unseen by autograd: chunks that run in "
                "another order would see other values. Write it before the forward, in a torch.no_grad() block."
            )

    def _written(self) -> Iterator[tuple[AliasRow, int, int]]:
        """Those of the parameters that were written in place, with their versions then and now."""
        then, now = self._versions[0], versions(self._reals)
        if now != then:
            yield from [row for row in zip(self._rows, then, now) if row[1] != row[2]]

    def _check_flags(self) -> None:
        """Raise if a forward froze or unfroze a parameter, or registered a hook on it: its alias alone got that."""
        for real, _, alias in self._rows:
            now, change = alias.requires_grad, ""
            if now != real.requires_grad and now != (id(alias) in self._trained):
                change = f"set requires_grad to {now} of"
            behind_sum = alias._post_accumulate_grad_hooks
            if alias._backward_hooks or behind_sum and len(behind_sum) > (self._guard in behind_sum):
                change = "registered a hook on"
            if change:
                raise RuntimeError(
                    f"a forward of {self._stage} {change} parameter '{self._name_of(alias)}'. An alias of this call "
                    "stands in for it there, so the parameter did not get it. Do that once, before the call."
                )

    def _check_copies(self, written: Container[int] = ()) -> None:
        """Raise if a forward wrote a copy. `written`: the ids of aliases whose parameters were written meanwhile."""
        for (_, local, alias), version in zip(self._copies, self._versions[1]):
            if versions([alias]) != (version,) or alias.data_ptr() != local.data_ptr() or id(alias) in written:
                raise RuntimeError(
                    f"parameter '{self._name_of(alias)}' of {self._stage}, which it shares with an earlier stage at "
                    "another place, was written in place within this call, for which it has a copy: one of the two "
                    "would not get that. Write it before the forward, in a torch.no_grad() block (for "
                    "nn.Embedding(max_norm=...): renormalise the weight there)."
                )

    def _changed(self, table: ModuleTable, before: ModuleTable) -> RuntimeError:
        """The error of a forward that took parameters out of a module; `before`: those that stood there."""
        module = next(module for module, swapped in zip(self._modules, self._tables.tables) if swapped is table)
        name = next(name for name in before if table.get(name, table) is not before[name])
        return RuntimeError(
            f"parameter '{self._path(module, name)}' was {'replaced' if name in table else 'deleted'} "
            f"by a forward of {self._stage}. Aliases stand in for the parameters there, so the new one would be lost. "
            "Write the parameter in place before the forward, in a torch.no_grad() block. Keep what a forward computes "
            "in a local variable, or pass it to torch.func.functional_call."
        )

    def _name_of(self, alias: Tensor) -> str:
        """The name of a parameter where it stands first."""
        tables = zip(self._modules, self._tables.stand_ins)
        return next(
            self._path(module, name) for module, table in tables for name, value in table.items() if value is alias
        )

    def _path(self, wanted: nn.Module, name: str) -> str:
        for index, layer in self._layers:
            for path, module in sequential({str(index): layer}).named_modules():
                if module is wanted:
                    return ".".join(part for part in (path, name) if part)
        return name


def _alias(real: Tensor, local: Tensor, trains: bool, description: str) -> Tensor:
    """A leaf on the memory of `local`, which has the values of a parameter.

    Args:
        real: the parameter.
        trains: whether its gradient is wanted.
        description: what it stands for.
    """
    alias: Tensor
    kind = type(real)
    if kind is nn.Parameter or issubclass(kind, nn.Parameter):  # nn.Parameter(local.detach(), trains), in half the time
        alias = torch.Tensor._make_subclass(kind, local, trains)
    else:
        alias = local.detach().requires_grad_(trains)
    if trains and real.dtype in HALF:
        alias.grad_dtype = torch.float32  # so the sum over chunks is rounded once, at the end
    return mark(with_attributes(alias, real) if vars(real) else alias, description)
