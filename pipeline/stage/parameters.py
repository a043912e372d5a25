"""The parameters of a stage as leaves of one call (aliases), and the check that their values stay as they were.

    module._parameters["weight"] = p      taken out while the stage computes; an alias stands in its place:
    nn.Parameter(p.detach())              a leaf of its own on p's memory, version counter shared
    alias.grad                            the stage's sum over chunks, added to as each gradient is computed; float32
                                          for parameters of half precision, whose sums would round at every chunk

So the parameters themselves see one whole gradient per backward pass. They are read from the modules at each call; a
swap puts back what it found. A frozen parameter has an alias too, so that freezing it later changes nothing.

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
from collections.abc import Callable, Container, Iterable, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.common.errors import CheckpointError
from pipeline.common.graph import StrayGradientGuard, mark, owned
from pipeline.common.module_tables import Table, parameters_of
from pipeline.data.pytrees import checksums, same_checksums, versions

HALF = (torch.float16, torch.bfloat16)


class _Slot(NamedTuple):
    module: nn.Module
    table: Table  # of its parameters; under functional_call it holds plain tensors
    name: str
    real: Tensor
    alias: Tensor
    version: int  # of the parameter
    alias_version: int
    here: Tensor  # the parameter, or its copy. Referenced, so that its address is not reused
    is_home: bool


class Aliases:
    """The parameters of one stage during one call.

    Args:
        modules: the modules of the stage.
        layers: its layers, by their index in the Sequential.
        stage: how errors name the stage.
        guard: refuses gradients that another backward brings.
        compares: whether to check for parameters that a forward wrote without their version counters, and to guard
            every alias from the beginning.
        bring: from a parameter to its values at this place: itself, or a copy.
        grad: whether the call has gradients. Without, only parameters of other places need an alias.
        wanted: the ids of the parameters whose gradients are wanted, of those that require one. None: all.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        layers: Sequence[tuple[int, nn.Module]],
        stage: str,
        guard: StrayGradientGuard,
        compares: bool,
        bring: Callable[[Tensor], Tensor],
        grad: bool,
        wanted: Container[int] | None = None,
    ) -> None:
        found: dict[int, tuple[Tensor, Tensor]] = {}  # by the parameter's id: what it is here, its alias
        self._layers = layers
        self._stage = stage
        self._slots: list[_Slot] = []
        for module in modules:
            table = parameters_of(module)
            for name, real in table.items():
                if real is None:
                    continue
                if id(real) not in found:
                    here = bring(real)
                    found[id(real)] = here, _alias(real, here.detach(), stage, wanted is None or id(real) in wanted)
                here, alias = found[id(real)]
                is_home = here is real
                if grad or not is_home:
                    then, own = versions([real, alias])
                    self._slots.append(_Slot(module, table, name, real, alias, then, own, here, is_home))
        self._places = _by_table([(slot, slot.alias) for slot in self._slots])
        self._trained = {id(slot.alias): slot for slot in self._slots if slot.alias.requires_grad}
        self._used: set[int] = set()
        self._guard = guard
        self._is_summing = False
        if compares:
            self._guard_aliases(lambda alias: True)
        self._sums = checksums([slot.alias for slot in self._slots]) if compares else []

    def __contains__(self, leaf: int) -> bool:
        return leaf in self._trained

    def use(self, leaf: int) -> None:
        """Note that an output depends on the alias with this id."""
        self._used.add(leaf)

    def may_wait(self, leaf: Tensor) -> bool:
        """Whether a leaf is one of these aliases, whose gradient may be computed later than the others."""
        return id(leaf) in self._trained

    @property
    def owners(self) -> set[int]:
        """The ids of the real parameters."""
        return {id(slot.real) for slot in self._slots}

    @property
    def used(self) -> list[Tensor]:
        """The aliases that an output depends on."""
        return [slot.alias for key, slot in self._trained.items() if key in self._used]

    @property
    def used_parameters(self) -> list[Tensor]:
        """The real parameters that an output depends on, in the order of the modules."""
        return [slot.real for key, slot in self._trained.items() if key in self._used]

    @property
    def trained(self) -> list[tuple[Tensor, Tensor]]:
        """(real parameter, alias) of all whose gradients are wanted, each once, in the order of the modules."""
        return [(slot.real, slot.alias) for slot in self._trained.values()]

    def stand_in(self) -> Swap:
        """Within: the aliases stand in the modules."""
        return Swap(self._places, self._changed)

    def stand_back(self, views: dict[int, Tensor]) -> Swap:
        """Within: `views` of the real parameters (by their ids) stand in the modules."""
        here: dict[int, Tensor] = {}
        for slot in self._slots:
            view = views.get(id(slot.real), slot.alias)
            here[id(slot.real)] = view if view.device == slot.alias.device else view.to(slot.alias.device)
        return Swap(_by_table([(slot, here[id(slot.real)]) for slot in self._slots]), self._changed)

    # -------------------------------------------------------------------------------------------------------- sums

    def begin_sums(self) -> None:
        """Begin a backward of the stage, unless one is under way.

        Raises:
            RuntimeError: another backward has brought a gradient.
        """
        if not self._is_summing:
            self._is_summing = True
            if any([slot.alias.grad is not None for slot in self._trained.values()]):
                self._guard()

    def take_sums(self) -> list[tuple[Tensor, Tensor]]:
        """(Parameter, this stage's sum over chunks) of all that have one; forgets the sums.

        An alias that some graph still holds is guarded from now on.
        """
        self._is_summing = False
        sums = []
        for slot in self._trained.values():
            if slot.alias.grad is not None:
                sums.append((slot.real, slot.alias.grad))
                slot.alias.grad = None
        self._guard_aliases(_is_held)
        return sums

    def _guard_aliases(self, which: Callable[[Tensor], bool]) -> None:
        for slot in self._trained.values():
            if which(slot.alias):  # as registering a hook does, in less time
                slot.alias._post_accumulate_grad_hooks = OrderedDict({self._guard: self._guard})

    @staticmethod
    def add(alias: Tensor, grad: Tensor) -> None:
        """Add to an alias's sum a gradient that did not come through autograd."""
        grad = grad.float() if alias.dtype in HALF else grad
        alias.grad = owned(grad, alias) if alias.grad is None else alias.grad + grad

    def drop_sums(self) -> None:
        """Drop the sums."""
        self._is_summing = False
        for slot in self._trained.values():
            slot.alias.grad = None

    def release(self) -> None:
        """Drop the aliases, and with them the copies."""
        self._guard_aliases(_is_held)
        self._slots.clear()
        self._places.clear()
        self._trained.clear()

    # ------------------------------------------------------------------------------------------------------ checks

    def check_versions(self, chunk: int) -> None:
        """Raise if a parameter was written since F."""
        for slot in self._slots:
            if not slot.is_home:
                self._check_unwritten(slot)
            version = slot.alias._version if slot.is_home else versions([slot.real])[0]
            if version != slot.version:
                raise CheckpointError(
                    f"parameter '{self._name_of(slot)}' (shape {list(slot.real.shape)}) of {self._stage} was changed "
                    f"in place between the forward and the recomputation of chunk {chunk}: it is at version "
                    f"{version}, expected version {slot.version}. Step the optimizer after backward(). "
                    "If a layer writes it within its forward (nn.Embedding(max_norm=...), an initialisation from the "
                    "first data), use checkpoint='never', or let it write before: torch.no_grad() around "
                    "pipe.to_sequential()(x)."
                )

    def check_memory(self) -> None:
        """Raise if a forward set a parameter's data (only its alias got that), or wrote it past its version counter."""
        for slot in self._slots:
            if not slot.is_home:
                self._check_unwritten(slot)
                if versions([slot.real]) != (slot.version,):
                    raise RuntimeError(
                        f"parameter '{self._name_of(slot)}' of {self._stage} was written in place within this call, by "
                        "the earlier stage at another place that owns it, or by other code: this stage computes with a "
                        "copy from before. Write it before the forward, in a torch.no_grad() block (for "
                        "nn.Embedding(max_norm=...): renormalise the weight there)."
                    )
            if slot.is_home and slot.alias.data_ptr() != slot.here.data_ptr():
                raise RuntimeError(
                    f"parameter '{self._name_of(slot)}' of {self._stage} got new data within the forward (param.data "
                    "= ...). Write it in place before the forward, in a torch.no_grad() block."
                )
        if not self._sums or any(versions([slot.alias]) != (slot.alias_version,) for slot in self._slots):
            return
        if not same_checksums(self._sums, checksums([slot.alias for slot in self._slots])):
            raise CheckpointError(
                f"a forward of {self._stage} wrote a parameter through .data, unseen by autograd: chunks that run in "
                "another order would see other values. Write it before the forward, in a torch.no_grad() block."
            )

    def _check_unwritten(self, slot: _Slot) -> None:
        """Raise if a forward wrote a copy."""
        if versions([slot.alias]) != (slot.alias_version,) or slot.alias.data_ptr() != slot.here.data_ptr():
            raise RuntimeError(
                f"a forward of {self._stage} wrote parameter '{self._name_of(slot)}', which it shares with an "
                "earlier stage at another place: it has a copy for this call. Write it in place before "
                "the forward, in a torch.no_grad() block."
            )

    def _changed(self, table: Table, before: Table) -> RuntimeError:
        """The error of a forward that took parameters out of a module; `before`: those that stood there."""
        slot = next(slot for slot in self._slots if slot.table is table)
        name = next(name for name in before if table.get(name, table) is not before[name])
        return RuntimeError(
            f"parameter '{self._name_of(slot._replace(name=name))}' was {'replaced' if name in table else 'deleted'} "
            f"by a forward of {self._stage}. Aliases stand in for the parameters there, so the new one would be lost. "
            "Write the parameter in place before the forward, in a torch.no_grad() block. Keep what a forward computes "
            "in a local variable, or pass it to torch.func.functional_call."
        )

    def _name_of(self, wanted: _Slot) -> str:
        for index, layer in self._layers:
            for path, module in layer.named_modules():
                if module is wanted.module:
                    return ".".join(part for part in (str(index), path, wanted.name) if part)
        return wanted.name


class Swap:
    """Within: other tensors stand in the modules' tables. At the end: those from before, and those that were added.

    Args:
        places: tables of parameters, and the tensors that each holds within.
        changed: makes the error of a table in which one of these was replaced.
    """

    __slots__ = ("_places", "_changed", "_found")

    def __init__(self, places: list[tuple[Table, Table]], changed: Callable[[Table, Table], RuntimeError]) -> None:
        self._places = places
        self._changed = changed
        self._found: list[Table] = []

    def __enter__(self) -> None:
        self._found = [table.copy() for table, _ in self._places]
        for table, within in self._places:
            table.update(within)

    def __exit__(self, kind: object, *exc: object) -> None:
        error = None
        for (table, within), found in zip(self._places, self._found):
            if len(table) != len(within) or not all(map(is_, table.values(), within.values())):
                before = {**found, **within}
                if any([table.get(name, table) is not tensor for name, tensor in before.items()]):
                    error = self._changed(table, before)
            table.update(found)
        if error is not None and kind is None:
            raise error


def _is_held(alias: Tensor) -> bool:
    """Whether something holds an alias besides Python: a graph, or a view of it."""
    return alias._use_count() > 1  # type: ignore[attr-defined, no-any-return]  # torch's stub lacks it


def _by_table(stand_ins: Iterable[tuple[_Slot, Tensor]]) -> list[tuple[Table, Table]]:
    """The modules' tables of parameters, and what each holds with the stand-ins."""
    tables: dict[int, tuple[Table, Table]] = {}
    for slot, tensor in stand_ins:
        tables.setdefault(id(slot.table), (slot.table, slot.table.copy()))[1][slot.name] = tensor
    return list(tables.values())


def _alias(real: Tensor, alias: Tensor, stage: str, wanted: bool) -> Tensor:
    if real.requires_grad and wanted:
        alias = nn.Parameter(alias) if type(real) is nn.Parameter else alias.requires_grad_()
        if real.dtype in HALF:
            alias.grad_dtype = torch.float32  # so the sum over chunks is rounded once, at the end
    noted = vars(real)
    if noted:
        vars(alias).update(noted)  # attributes that layers have set on their parameter
    return mark(alias, f"a parameter of {stage}")
