"""The sources of a value, for a part of a model: what it was computed from that does not lie in this part.

    output ◄── norm ◄── what block 7 returned       a source: the block, and the place among what it returned
       ▲
       └─ + ◄── scale ◄── embed                     lost, but where the part has `embed`, too

What was computed from the inputs alone has none: each part computes it again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from partition.models.calls import ModelRun, ModuleCall
from partition.models.chains import outermost_calls
from partition.models.flow import Flow, StorageVersion
from partition.models.passing import ValueSlot
from partition.models.runs import names_of
from partition.models.shares import unit_of

_NameSet = frozenset[str]


class LostValue(NamedTuple):
    """Something that was computed in another part.

    Attributes:
        words: what it is.
        unit: the name of what the part has to have to compute it as well: a parameter, or a module that is not called,
            nor is anything in it, or not with a tensor. "": it would have to travel, or has decided the way.
        module: the name of the module that returned it, and would as a block. "": none did that is called once.
    """

    words: str
    unit: str = ""
    module: str = ""


class ValueSources(NamedTuple):
    """The sources of some values.

    Attributes:
        slots: values that blocks returned, and what else was offered.
        lost: what else was computed in another part.
    """

    slots: set[ValueSlot]
    lost: list[LostValue]


class Sources:
    """The flow of a run through blocks, and through modules that lie in parts.

    Args:
        model: the model.
        run: the model's.
        blocks: of the model, as they were called in it.
        part_names: the names of the modules and parameters that lie in parts.
    """

    def __init__(
        self, model: nn.Module, run: ModelRun, blocks: Sequence[ModuleCall], part_names: Collection[str]
    ) -> None:
        self.blocks = blocks
        self.run = run
        self._numbers = {block.begin: number for number, block in enumerate(blocks)}
        self._calls = {call.begin: call for call in run.calls}
        prefixes = tuple([f"{name}." for name in part_names])
        inner_names = {call.name for call in run.calls if f"{call.name}.".startswith(prefixes)}
        called = [f"{call.name}." for call in outermost_calls(run.calls, inner_names) if call.nodes]
        self._repeatable = frozenset([
            name for name in part_names if not any(prefix.startswith(f"{name}.") for prefix in called)
        ])  # fmt: skip
        self._times = Counter(call.name for call in run.calls)
        names = names_of(model)
        self._units = {
            call.begin: frozenset(names[id(model.get_submodule(call.name))]) & set(part_names) for call in run.calls
        }
        self._owners = _owners(model, run.flow, [*part_names, *[block.name for block in blocks]])
        spans: list[tuple[int, int, int | _NameSet]] = []
        for call in run.calls:
            enclosing = self._numbers.get(call.begin, self._units[call.begin])
            if enclosing != frozenset() and (not spans or call.begin > spans[-1][1]):
                spans.append((call.begin, call.end, enclosing))
        self._spans = spans
        self._begins = [begin for begin, _, _ in spans]
        self._returned_by = {
            node.previous: self._calls[node.returned_by[0]].name for node in reversed(run.flow.nodes)
            if node.returned_by and isinstance(self._enclosing(node.time), int)
        }  # by what a module within a block computes: the innermost that returns it

    def of(
        self,
        nodes: Iterable[int],
        present: Collection[str] = (),
        since: int | None = None,
        until: int = -1,
        offers: Mapping[int, Sequence[tuple[int, ValueSlot]]] = MappingProxyType({}),
    ) -> ValueSources:
        """The sources of some nodes.

        Args:
            nodes: of the flow.
            present: the names of the modules and parameters that the part has.
            since: from when on the part draws the random numbers that the model draws; None: never.
            until: what Python was told until then counts, too: it may have decided the way.
            offers: for nodes from when on which slots have them, for what the part cannot compute.
        """
        flow, sources = self.run.flow, ValueSources(set(), [])
        open_nodes, visited = list[int](), set[int]()

        def reach(numbers: Iterable[int], time: float) -> None:
            for number in numbers:
                slots = [slot for begin, slot in offers.get(number, ()) if begin < time]
                if slots and self.of((number,), present, since).lost:
                    sources.slots.add(slots[-1])
                elif number not in visited:
                    open_nodes.append(number)

        told = [
            (time, nodes_read) for time, nodes_read in flow.host_reads
            if time < until and not self._is_elsewhere(time, present)
        ]  # fmt: skip
        for roots, is_told in ((told, True), ([(inf, nodes)], False)):
            for time, numbers in roots:
                reach(numbers, time)
            while open_nodes:
                number = open_nodes.pop()
                if number in visited:
                    continue
                visited.add(number)
                node = flow.nodes[number]
                if node.returned_by is not None and node.returned_by[0] in self._numbers:
                    sources.slots.update((self._numbers[node.returned_by[0]], place) for place in node.returned_by[1])
                    continue
                lost = self._lost(number, present, since)
                if lost is not None:
                    sources.lost.append(lost._replace(unit="") if is_told else lost)
                else:
                    reach(node.parents, node.time)
        return sources

    def written(self) -> set[ValueSlot]:
        """The values that blocks returned into which the model wrote."""
        nodes = self.run.flow.nodes
        slots: set[ValueSlot] = set()
        for node in nodes:
            if node.previous is None or node.returned_by is not None or isinstance(self._enclosing(node.time), int):
                continue
            number: int | None = node.previous
            while number is not None:
                node = nodes[number]
                if node.returned_by is not None and node.returned_by[0] in self._numbers:
                    slots.update((self._numbers[node.returned_by[0]], place) for place in node.returned_by[1])
                    break
                number = node.previous
        return slots

    def _lost(self, number: int, present: Collection[str], since: int | None) -> LostValue | None:
        node = self.run.flow.nodes[number]
        enclosing = self._enclosing(node.time) if node.returned_by is None else self._units[node.returned_by[0]]
        if isinstance(enclosing, int):
            words = f"what block {self.blocks[enclosing].name!r} computes beside what it returns"
            return LostValue(words, module=self._returned_by.get(number, ""))
        owners = self._owners.get(self.run.flow.computed(number), frozenset())
        names = owners or enclosing
        if names and not names & set(present):
            unit = min(names & self._repeatable, default="")
            return LostValue(f"what {min(names)!r} {'holds' if owners else 'computes'}", unit, self._module_of(node))
        if node.drawn and (since is None or node.time < since):
            return LostValue("what is drawn at random")
        return None

    def _module_of(self, node: StorageVersion) -> str:
        """The name of a module that returned a node, lies in a part and is called once, with a tensor."""
        call = node.returned_by and self._calls[node.returned_by[0]]
        is_single = call and self._units[call.begin] and call.nodes and self._times[call.name] == 1
        return call.name if call and is_single else ""

    def _is_elsewhere(self, time: int, present: Collection[str]) -> bool:
        enclosing = self._enclosing(time)
        return isinstance(enclosing, int) or bool(enclosing) and not enclosing & set(present)

    def _enclosing(self, time: int) -> int | _NameSet:
        """The block, or the names of the module, that was being called."""
        place = bisect_right(self._begins, time) - 1
        if place < 0 or time > self._spans[place][1]:
            return frozenset()
        return self._spans[place][2]


def _owners(model: nn.Module, flow: Flow, part_names: Collection[str]) -> dict[int, _NameSet]:
    """The names, of those that lie in parts, under which the node of a parameter or a buffer can be had."""
    owners: dict[int, _NameSet] = {}
    for name in part_names:
        unit = unit_of(model, name)
        tensors = [unit] if isinstance(unit, Tensor) else [*unit.parameters(), *unit.buffers()]
        for tensor in tensors:
            node = flow.computed(flow.node(tensor))
            owners[node] = owners.get(node, frozenset()) | {name}
    return owners
