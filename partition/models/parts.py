"""The parts of a model as layers of an nn.Sequential: its beginning, its blocks, its end; between two chains a middle.

    x --> Beginning --> (hidden state, inputs, passing) --> Block --> ... --> Block --> End --> the model's output

What travels beside the hidden state is those inputs whose numbers are read again: ids, padding masks. What the model
makes of them for its blocks is made again in each stage (`Outline.arguments_of_block`), and not sent. Only what the
beginning computes for all blocks with parameters travels, as what passes blocks by does: the embedding of a diffusion
model's time.

A part holds modules of the model under their names in the model, and brings these: `partition.names`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from partition.contents import storage_of, tensors_in, version_of
from partition.errors import PartitionError
from partition.models.as_found import is_same
from partition.models.inputs import Leaves, UnlikeSampleError
from partition.models.outline import Outline
from partition.models.runs import ArgumentKey, BlockChain, CallArguments, OutlineRun, Switches, chain_of
from partition.models.shapes import is_whole
from partition.modes import mode_of
from partition.names import Holder, ModelNames, NamedLayer
from partition.opaque import seen_of

_PartLeaves: TypeAlias = tuple[Any, ...]
PartValue: TypeAlias = tuple[_PartLeaves, _PartLeaves, _PartLeaves]  # hidden state, inputs, passing


class Part(NamedLayer, Holder):
    """Some modules, parameters and buffers of a model, under their names.

    These may be names of attributes of parts: they are put into the tables, and looked for there. What a part sets of
    its own it sets before.

    Args:
        outline: of the model.
        units: the modules, parameters and buffers, by their names in the model.
    """

    def __init__(self, outline: Outline, units: Mapping[str, nn.Module | Tensor]) -> None:
        super().__init__()
        self._outline = (outline,)  # not as a child
        self._names = tuple(units)
        inside = tuple([f"{name}." for name in units])
        self._told = tuple([pair for pair in outline.passing.told if pair[0] in units or pair[0].startswith(inside)])
        for name, unit in units.items():
            parent, _, key = name.rpartition(".")
            holder = self._holder(parent)
            if isinstance(unit, nn.Module):
                holder._modules[key] = unit
            elif isinstance(unit, nn.Parameter):
                holder._parameters[key] = unit
            else:
                holder._buffers[key] = unit

    def _holder(self, name: str) -> nn.Module:
        """The module that has a name, in which there may be others. It is added if it is not there."""
        holder: nn.Module = self
        for step in name.split(".") if name else ():
            if step not in holder._modules:
                holder._modules[step] = Holder()
            holder = holder._modules[step]  # type: ignore[assignment]  # just added
        return holder

    @property
    def outline(self) -> Outline:
        """The outline of the model."""
        return self._outline[0]

    @property
    def in_model(self) -> ModelNames:
        return ModelNames(self._names, self.outline.places, {})

    def _told_values(self) -> list[tuple[str, str, Any]]:
        """The attributes of its modules that the model's own forward reads, in other parts too: module, name, value."""
        values = []
        for name, key in self._told:
            with suppress(AttributeError):  # of a module in which others have been put, as adapters do
                module = self.get_submodule(name)
                values.append((name, key, vars(module).get(key, getattr(type(module), key, None))))
        return values

    def _check_told(self, before: Iterable[tuple[str, str, Any]]) -> None:
        """See that these attributes are what they were.

        Raises:
            PartitionError: a module of this part has set one.
        """
        for (_, _, earlier), (name, key, value) in zip(before, self._told_values(), strict=True):
            if not is_same(value, earlier):
                raise PartitionError(
                    f"{name!r} sets its attribute {key!r}, which the model's own forward reads: other parts have "
                    "another one there. Return it from the module."
                )

    def _units(self) -> dict[str, Any]:
        """The modules and parameters as they are now, by their names in the model."""
        units: dict[str, Any] = {}
        for name in self._names:
            unit: Any = self
            for key in name.split("."):
                unit = (unit._modules | unit._parameters | unit._buffers)[key]
            units[name] = unit
        return units

    @property
    def begin(self) -> Callable[[], object]:
        return self.outline.begin_call

    def extra_repr(self) -> str:
        return ", ".join(self._names)


class OutlinePart(Part):
    """A part that runs the forward of the model itself, before, between or after its chains of blocks.

    Args:
        outline: of the model.
        units: its modules and parameters.
        number: of the chain that follows; that behind the last one has none.
    """

    def __init__(self, outline: Outline, units: Mapping[str, nn.Module | Tensor], number: int) -> None:
        self._number = number
        super().__init__(outline, units)
        for name in outline.settings:
            self._holder(name)

    @property
    def modes(self) -> dict[str, bool]:
        """The modes of the modules of the model that contain blocks, by their names: train mode or not."""
        return {name: mode_of(self._holder(name)) for name in self.outline.settings}

    @property
    def in_model(self) -> ModelNames:
        return super().in_model._replace(settings=self.outline.settings)

    @property
    def buffers_beside(self) -> Iterable[Tensor]:
        return self.outline.buffers_beside

    def _run(self, run: OutlineRun, leaves: Leaves, device: torch.device) -> Any:
        told = self._told_values()
        returned = self.outline.run(run, leaves, device, self._units(), self.modes)
        self._check_told(told)
        return returned

    def _resumed(self, value: PartValue) -> tuple[OutlineRun, Any]:
        """A run that goes on where the chain before has ended, and what the model returns."""
        hidden, travelling, values = value
        outline, number = self.outline, self._number
        before = outline.chains[number - 1]
        device = next(leaf.device for leaf in hidden if leaf is not None)
        exits = zip([(before.last, place) for place in before.exits], hidden, strict=True)
        arrived = outline.passing.arrived(number, values, dict(exits))
        rewind = outline.generator_rewind(device, before.last, any(self.modes.values()))
        end = outline.chains[number].first if number < len(outline.chains) else None
        run = OutlineRun(outline.chains, end, arrived, before.last, rewind)
        held = tensors_in(outline.passing.behind(number, values))
        versions = list(map(version_of, held))
        returned = self._run(run, outline.inputs.arrived(travelling, device), device)
        if list(map(version_of, held)) != versions:
            raise UnlikeSampleError(
                "the model's own forward writes into what a block returned, or was called with, as it did not",
                "Another part reads that: write to a copy. ",
            )
        return run, returned

    def _value(self, run: OutlineRun, travelling: _PartLeaves, values: _PartLeaves) -> PartValue:
        """The value for the chain that follows, whose first block a run has come to."""
        chain, passing = self.outline.chains[self._number], self.outline.passing
        call = self.outline.call_of_block(run.calls, chain.first)
        _check_whole(chain, passing.keys(chain.first, self._number + 1), call)
        keys = [*chain.entries, *passing.keys(chain.first)]
        given = {key: run.here(call[key], f"argument {key[0]!r} of block {chain.blocks[0]!r}") for key in keys}
        return tuple([given[key] for key in chain.entries]), travelling, passing.filled(chain.first, given, values)


class Beginning(OutlinePart):
    """All that a model computes before its first block."""

    def forward(self, x: Any) -> PartValue:
        leaves = self.outline.inputs.leaves(x)
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        run = OutlineRun(self.outline.chains, 0)
        self._run(run, leaves, device)
        return self._value(run, self.outline.inputs.travelling(leaves), (None,) * len(self.outline.passing.slots))


class Block(Part):
    """One block of a model.

    Args:
        outline: of the model.
        number: of the block.
        names: its names in the model.
        block: the block.
    """

    def __init__(self, outline: Outline, number: int, names: Sequence[str], block: nn.Module) -> None:
        self._number = number
        super().__init__(outline, dict.fromkeys(names, block))

    def forward(self, value: PartValue) -> PartValue:
        hidden, travelling, passing = value
        chain = chain_of(self.outline.chains, self._number)
        if self._number == chain.first:
            _check_dtypes(hidden, chain.dtypes)
        args, kwargs, switches = self.outline.call(self._number, *value)
        held = [*tensors_in(passing), *self._held(hidden, args, kwargs)]
        versions, told = list(map(version_of, held)), self._told_values()
        with nullcontext() if switches == Switches.now() else switches.entered():
            returned = self.block(*args, **kwargs)
        self._check_told(told)
        if list(map(version_of, held)) != versions:
            raise UnlikeSampleError(
                f"block {self._names[0]!r} writes into what it is called with, or another part reads, as it did not",
                "Let it write to a copy: h = h.clone(). ",
            )
        leaves = self._leaves(returned, chain)
        passing = self.outline.passing.filled(self._number, dict(enumerate(leaves)), passing)
        return tuple([leaves[place] for place in chain.exits]), travelling, passing

    def _held(self, hidden: _PartLeaves, args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of its arguments that the block may not write: the hidden state it may, as on the sample."""
        tensors = tensors_in([*args, *kwargs.values()])
        if self._number in self.outline.passing.writers:
            return [tensor for tensor in tensors if all(tensor is not state for state in hidden)]
        return tensors

    @property
    def block(self) -> nn.Module:
        """The block itself."""
        block = self._units()[self._names[0]]
        assert isinstance(block, nn.Module)
        return block

    @property
    def around(self) -> tuple[int, int]:
        """The outline and the chain, which blocks that are called alike have in common."""
        return id(self.outline), chain_of(self.outline.chains, self._number).first

    def called(self, value: PartValue) -> tuple[list[Any], dict[str, Any]] | None:
        """The arguments of the block. None: what it does with what it returns depends on its number."""
        args, kwargs, switches = self.outline.call(self._number, *value)
        slots = self.outline.passing.slots
        returns_slot = any(block == self._number and isinstance(place, int) for block, place in slots)
        return None if returns_slot or switches != Switches.now() else (args, kwargs)

    def _leaves(self, returned: Any, chain: BlockChain) -> Leaves:
        """The leaves that the block returned: tensors, and what else it returned on the sample."""
        leaves = chain.leaves(self._number, returned)
        for leaf, on_sample in zip(leaves, chain.returned, strict=True):
            if not is_same(seen_of(leaf), on_sample):
                raise UnlikeSampleError(
                    f"block {self._names[0]!r} returned {'a tensor' if isinstance(leaf, Tensor) else repr(leaf)}, and "
                    f"{'a tensor' if on_sample is Tensor else repr(on_sample)}",
                    "Only tensors go from one part to another: return one in each call. ",
                )
        return leaves


class Middle(OutlinePart):
    """All that a model computes between two chains: between an encoder and a decoder, before a skip is read."""

    def forward(self, value: PartValue) -> PartValue:
        run, _ = self._resumed(value)
        return self._value(run, value[1], self.outline.passing.behind(self._number, value[2]))


class End(OutlinePart):
    """All that a model computes after its last block.

    Args:
        outline, units, number: as of any part.
        output: what is made of what the model returns.
    """

    def __init__(
        self, outline: Outline, units: Mapping[str, nn.Module | Tensor], number: int, output: Callable[[Any], Any]
    ) -> None:
        self._output = output
        super().__init__(outline, units, number)

    def forward(self, value: PartValue) -> Any:
        run, returned = self._resumed(value)
        return tree_map_only(Tensor, lambda tensor: run.here(tensor, "the output"), self._output(returned))


def _check_whole(chain: BlockChain, keys: Iterable[ArgumentKey], call: CallArguments) -> None:
    """See that what is read behind a chain, as it arrives there, are no slices: nobody computes the rest there."""
    for key in keys:
        if isinstance(call[key], Tensor) and storage_of(call[key]) >= 0 and not is_whole(call[key]):
            raise UnlikeSampleError(
                f"argument {key[0]!r} of block {chain.blocks[0]!r} is a slice of what was computed, and was all of it",
                "What is read of it behind the blocks arrives with it. ",
            )


def _check_dtypes(hidden: Iterable[Any], dtypes: Iterable[torch.dtype | None]) -> None:
    for leaf, dtype in zip(hidden, dtypes, strict=True):
        is_other = leaf is not None and dtype is not None and leaf.dtype != dtype
        if is_other and not torch.is_autocast_enabled(leaf.device.type):
            raise PartitionError(
                f"the hidden state is {leaf.dtype}, and was {dtype} when the model was cut. A model is cast before "
                f"that: Pipe(model.to({leaf.dtype}), sample=...)."
            )
