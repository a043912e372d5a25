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
from partition.models.flow import Flow
from partition.models.passing import ValueSlot
from partition.models.runs import names_of
from partition.models.shares import unit_of

_NameSet = frozenset[str]


class LostValue(NamedTuple):
    """Something that was computed in another part.

    Attributes:
        words: what it is.
        unit: the name of what the part has to have to compute it as well: a parameter, or a module that is not called,
            nor is anything in it. "": it would have to travel, or has decided the way.
    """

    words: str
    unit: str = ""


class ValueSources(NamedTuple):
    """The sources of some values.

    Attributes:
        slots: values that blocks returned, and what else was offered.
        lost: what else was computed in another part.
        returned: nodes that modules of other parts returned, where these are asked for.
    """

    slots: set[ValueSlot]
    lost: list[LostValue]
    returned: set[int]


class Sources:
    """The flow of a run through blocks, and through modules that lie in parts.

    Args:
        model: the model.
        run: the model's.
        blocks: of the model, as they were called in it.
        part_names: the names of the modules and parameters that lie in parts.
        containers: those of the modules that contain blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        run: ModelRun,
        blocks: Sequence[ModuleCall],
        part_names: Collection[str],
        containers: Collection[str] = (),
    ) -> None:
        self.blocks = blocks
        self.run = run
        self._numbers = {block.number: number for number, block in enumerate(blocks)}
        self._calls = {call.number: call for call in run.calls}
        called = {f"{call.name}." for call in run.calls}
        self._uncalled = frozenset([
            name for name in part_names if not any(prefix.startswith(f"{name}.") for prefix in called)
        ])  # fmt: skip
        self._times = Counter(call.name for call in run.calls)
        self._containers = {call.number for call in run.calls if call.name in containers}
        names = names_of(model)
        self._units = {
            call.number: frozenset(names[id(model.get_submodule(call.name))]) & set(part_names) for call in run.calls
        }
        self._owners = _owners(model, run.flow, [*part_names, *[block.name for block in blocks]])
        spans: list[tuple[int, int, int | _NameSet]] = []
        for call in run.calls:
            enclosing = self._numbers.get(call.number, self._units[call.number])
            if enclosing != frozenset() and (not spans or call.begin > spans[-1][1]):
                spans.append((call.begin, call.end, enclosing))
        self._spans = spans
        self._begins = [begin for begin, _, _ in spans]

    def of(
        self,
        nodes: Iterable[int],
        present: Collection[str] = (),
        since: int | None = None,
        until: int = -1,
        offers: Mapping[int, Sequence[tuple[int, ValueSlot]]] = MappingProxyType({}),
        returned_before: int = -1,
    ) -> ValueSources:
        """The sources of some nodes.

        Args:
            nodes: of the flow.
            present: the names of the modules and parameters that the part has.
            since: from when on the part draws the random numbers that the model draws; None: never.
            until: what Python was told until then counts, too: it may have decided the way.
            offers: for nodes from when on which slots have them, for what the part cannot compute.
            returned_before: what modules had returned by then is no loss.
        """
        flow, sources = self.run.flow, ValueSources(set(), [], set())
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
                if lost is not None and node.time < returned_before and self.call_of(number) is not None:
                    sources.returned.add(number)
                elif lost is not None:
                    sources.lost.append(lost._replace(unit="") if is_told else lost)
                elif node.time < returned_before and self._is_lost_within(number, present, since):
                    sources.returned.add(number)
                else:
                    reach(node.parents, node.time)
        return sources

    def call_of(self, number: int) -> ModuleCall | None:
        """The call of which a node is what it returned: the only one of a module that lies in a part or has blocks."""
        returned_by = self.run.flow.nodes[number].returned_by
        if returned_by is None or not self._units[returned_by[0]] and returned_by[0] not in self._containers:
            return None
        call = self._calls[returned_by[0]]
        return call if self._times[call.name] == 1 else None

    def _is_lost_within(self, number: int, present: Collection[str], since: int | None) -> bool:
        """Whether a module that contains blocks returned a node, and computed it from what is lost."""
        returned_by = self.run.flow.nodes[number].returned_by
        is_of_container = (
            returned_by is not None and returned_by[0] in self._containers and self.call_of(number) is not None
        )
        return is_of_container and bool(self.of((number,), present, since).lost)

    def written(self) -> tuple[set[ValueSlot], set[int]]:
        """The values that blocks returned, and the nodes that modules did, into which the model wrote."""
        nodes = self.run.flow.nodes
        slots: set[ValueSlot] = set()
        returned: set[int] = set()
        for node in nodes:
            if node.previous is None or node.returned_by is not None or isinstance(self._enclosing(node.time), int):
                continue
            number: int | None = node.previous
            while number is not None:
                node = nodes[number]
                if node.returned_by is not None and node.returned_by[0] in self._numbers:
                    slots.update((self._numbers[node.returned_by[0]], place) for place in node.returned_by[1])
                    break
                if self.call_of(number) is not None:
                    returned.add(number)
                number = node.previous
        return slots, returned

    def _lost(self, number: int, present: Collection[str], since: int | None) -> LostValue | None:
        node = self.run.flow.nodes[number]
        enclosing = self._enclosing(node.time) if node.returned_by is None else self._units[node.returned_by[0]]
        if isinstance(enclosing, int):
            return LostValue(f"what block {self.blocks[enclosing].name!r} computes beside what it returns")
        owners = self._owners.get(self.run.flow.computed(number), frozenset())
        names = owners or enclosing
        if names and not names & set(present):
            return LostValue(f"what {min(names)!r} computes", min(owners & self._uncalled, default=""))
        if node.drawn and (since is None or node.time < since):
            return LostValue("what is drawn at random")
        return None

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
