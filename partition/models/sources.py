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

from partition.models.calls import Called, Seen
from partition.models.flow import Flow
from partition.models.passing import Slot
from partition.models.runs import names_of

_NameSet = frozenset[str]


class FoundSources(NamedTuple):
    """The sources of some values.

    Attributes:
        slots: values that blocks returned, and what else was offered.
        lost: in words, what else was computed in another part.
        returned: nodes that modules of other parts returned, where these are asked for.
    """

    slots: set[Slot]
    lost: list[str]
    returned: set[int]


class Sources:
    """The flow of a run through blocks, and through modules that lie in parts.

    Args:
        model: the model.
        seen: the run.
        blocks: of the model, as they were called in it.
        apart: the names of the modules and parameters that lie in parts.
        containers: those of the modules that contain blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        seen: Seen,
        blocks: Sequence[Called],
        apart: Collection[str],
        containers: Collection[str] = (),
    ) -> None:
        self.blocks = blocks
        self.seen = seen
        self._numbers = {block.number: number for number, block in enumerate(blocks)}
        self._calls = {call.number: call for call in seen.calls}
        self._times = Counter(call.name for call in seen.calls)
        self._containers = {call.number for call in seen.calls if call.name in containers}
        names = names_of(model)
        self._units = {
            call.number: frozenset(names[id(model.get_submodule(call.name))]) & set(apart) for call in seen.calls
        }
        self._owners = _owners(model, seen.flow, [*apart, *[block.name for block in blocks]])
        spans: list[tuple[int, int, int | _NameSet]] = []
        for call in seen.calls:
            within = self._numbers.get(call.number, self._units[call.number])
            if within != frozenset() and (not spans or call.begin > spans[-1][1]):
                spans.append((call.begin, call.end, within))
        self._spans = spans
        self._begins = [begin for begin, _, _ in spans]

    def of(
        self,
        nodes: Iterable[int],
        present: Collection[str] = (),
        kept: Mapping[int, int] = MappingProxyType({}),
        since: int | None = None,
        until: int = -1,
        offered: Mapping[int, Sequence[tuple[int, Slot]]] = MappingProxyType({}),
        by: int = -1,
    ) -> FoundSources:
        """The sources of some nodes.

        Args:
            nodes: of the flow.
            present: the names of the modules and parameters that the part has.
            kept: nodes that reach the part, and when: they are there for what is computed later.
            since: from when on the part draws the random numbers that the model draws; None: never.
            until: what Python was told until then counts, too: it may have decided the way.
            offered: for nodes from when on which slots have them, for what the part cannot compute.
            by: what modules had returned by then is no loss.
        """
        flow, found = self.seen.flow, FoundSources(set(), [], set())
        open_nodes, visited = list[int](), set[int]()

        def reach(numbers: Iterable[int], time: float) -> None:
            for number in numbers:
                slots = [slot for begin, slot in offered.get(number, ()) if begin < time]
                if number in kept and kept[number] <= time:
                    continue
                if slots and self.of((number,), present, kept, since).lost:
                    found.slots.add(slots[-1])
                elif number not in visited:
                    open_nodes.append(number)

        reach(nodes, inf)
        for time, given in flow.told:
            if time < until and not self._is_elsewhere(time, present):
                reach(given, time)
        while open_nodes:
            number = open_nodes.pop()
            if number in visited:
                continue
            visited.add(number)
            node = flow.nodes[number]
            if node.left is not None and node.left[0] in self._numbers:
                found.slots.update((self._numbers[node.left[0]], place) for place in node.left[1])
                continue
            lost = self._lost(number, present, since)
            if lost and node.time < by and self.call_of(number) is not None:
                found.returned.add(number)
            elif lost:
                found.lost.append(lost)
            elif node.time < by and self._is_lost_within(number, present, kept, since):
                found.returned.add(number)
            else:
                reach(node.parents, node.time)
        return found

    def call_of(self, number: int) -> Called | None:
        """The call of which a node is what it returned: the only one of a module that lies in a part or has blocks."""
        left = self.seen.flow.nodes[number].left
        if left is None or not self._units[left[0]] and left[0] not in self._containers:
            return None
        call = self._calls[left[0]]
        return call if self._times[call.name] == 1 else None

    def _is_lost_within(
        self, number: int, present: Collection[str], kept: Mapping[int, int], since: int | None
    ) -> bool:
        """Whether a module that contains blocks returned a node, and computed it from what is lost."""
        left = self.seen.flow.nodes[number].left
        is_of_container = left is not None and left[0] in self._containers and self.call_of(number) is not None
        return is_of_container and bool(self.of((number,), present, kept, since).lost)

    def written(self) -> tuple[set[Slot], set[int]]:
        """The values that blocks returned, and the nodes that modules did, into which the model wrote."""
        nodes = self.seen.flow.nodes
        slots: set[Slot] = set()
        returned: set[int] = set()
        for node in nodes:
            if node.before is None or node.left is not None or isinstance(self._within(node.time), int):
                continue
            number: int | None = node.before
            while number is not None:
                node = nodes[number]
                if node.left is not None and node.left[0] in self._numbers:
                    slots.update((self._numbers[node.left[0]], place) for place in node.left[1])
                    break
                if self.call_of(number) is not None:
                    returned.add(number)
                number = node.before
        return slots, returned

    def _lost(self, number: int, present: Collection[str], since: int | None) -> str:
        node = self.seen.flow.nodes[number]
        within = self._within(node.time) if node.left is None else self._units[node.left[0]]
        if isinstance(within, int):
            return f"what block {self.blocks[within].name!r} computes beside what it returns"
        owners = self._owners.get(number) or within
        if owners and not owners & set(present):
            return f"what {min(owners)!r} computes"
        if node.drawn and (since is None or node.time < since):
            return "what is drawn at random"
        return ""

    def _is_elsewhere(self, time: int, present: Collection[str]) -> bool:
        within = self._within(time)
        return isinstance(within, int) or bool(within) and not within & set(present)

    def _within(self, time: int) -> int | _NameSet:
        """The block, or the names of the module, that was being called."""
        place = bisect_right(self._begins, time) - 1
        if place < 0 or time > self._spans[place][1]:
            return frozenset()
        return self._spans[place][2]


def _owners(model: nn.Module, flow: Flow, apart: Collection[str]) -> dict[int, _NameSet]:
    """The names, of those that lie in parts, under which the node of a parameter or a buffer can be had."""
    owners: dict[int, _NameSet] = {}
    for name in apart:
        above, _, key = name.rpartition(".")
        unit = getattr(model.get_submodule(above), key)
        tensors = [unit] if isinstance(unit, Tensor) else [*unit.parameters(), *unit.buffers()]
        for tensor in tensors:
            node = flow.node(tensor)
            owners[node] = owners.get(node, frozenset()) | {name}
    return owners
