"""A profile: what each layer of an nn.Sequential takes and holds for one chunk, as data.

    profile(module, sample) ──► Profile ──► a table, JSON          Profile.stage(i, j) ──► what layers i to j - 1 take
                                  │                                                        and hold together
                                  └─ LayerProfile of each layer, and of the loss
"""

import json
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from partition.errors import PartitionError
from partition.profiles.amounts import Bytes, MedianSpread, spelt_bytes, spelt_work, sum_of_bytes
from partition.reading import typed
from scheduler.aligning import aligned
from scheduler.notebook import NotebookResult

WorkUnit: TypeAlias = Literal["s", "FLOP"]


class Work(NamedTuple):
    """The work of the actions of one chunk, in seconds or in FLOPs.

    Attributes:
        forward: of F. A recomputation is the same once more.
        input: of I, the gradient of the input, and those gradients of parameters that cannot wait for W.
        weight: of W, the gradients of the parameters that can: matrices of products, convolutions, embeddings.
        backward: of B, both in one run of autograd, which takes less time than the two do.
    """

    forward: MedianSpread
    input: MedianSpread
    weight: MedianSpread
    backward: MedianSpread

    @property
    def total(self) -> float:
        """Of F and B."""
        return self.forward.median + self.backward.median


class SkipTraffic(NamedTuple):
    """Values that go past layers.

    Attributes:
        stashes, pops: (number, bytes) of those that leave a layer, and of those that come to it.
    """

    stashes: tuple[tuple[int, int], ...] = ()
    pops: tuple[tuple[int, int], ...] = ()


class SplitBackwardBytes(NamedTuple):
    """The bytes that the backward of a layer in halves, I and W, holds for one chunk.

    Attributes:
        inputs: of what it saved, those that it holds from I to W: the inputs of products.
        gradients: those that it holds beside from I to W: the gradients of the outputs of products.
        rise: by how much it holds more during I than before, at the most.
    """

    inputs: Bytes = Bytes(0)
    gradients: int = 0
    rise: int = 0

    @property
    def late(self) -> Bytes:
        """The bytes held from I to W."""
        return self.inputs._replace(own=self.inputs.own + self.gradients)


@dataclass(frozen=True)
class LayerProfile:
    """One layer, for one chunk.

    Attributes:
        name, kind: its name in the nn.Sequential, and its type's.
        work: what it takes.
        parameters: bytes; those that other layers have as well (tied weights) by number.
        gradients: bytes of the sums over chunks of the gradients of parameters that need one: of half precision in
            float32.
        optimizer: bytes of the optimizer's state for these.
        buffers: bytes.
        saved: bytes that autograd holds for the backward: storages, each once and whole, without parameters and
            buffers. Those that are the layer's input or output, or a skip, by number: its neighbour may hold them too.
        constants: bytes that autograd holds once, for all chunks: tables that the layer keeps as attributes.
        output: bytes of what it returns.
        skips: values that go to a later layer directly.
        waits: what a backward in halves holds.
    """

    name: str
    kind: str
    work: Work
    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    buffers: int
    saved: Bytes
    constants: int
    output: int
    skips: SkipTraffic = SkipTraffic()
    waits: SplitBackwardBytes = SplitBackwardBytes()

    @property
    def states(self) -> tuple[Bytes, Bytes, Bytes]:
        """The bytes that it holds all the time and that other layers may have as well, by kind."""
        return self.parameters, self.gradients, self.optimizer

    @property
    def lasting(self) -> int:
        """Bytes that it alone holds all the time: constants; buffers, a copy that a call keeps, one to recompute on."""
        return self.constants + 3 * self.buffers


class StageProfile(NamedTuple):
    """The work and the bytes of some neighbouring layers together, for one chunk.

    Attributes:
        forward, input, weight, backward: seconds or FLOPs of F, I, W and B.
        state: bytes of parameters, gradients, optimizer state, buffers with copies, and constants.
        saved: bytes that autograd holds from F to B.
        read: bytes of what comes from other stages: what is kept instead, where the stage is recomputed.
        split: the most of these while I runs: it frees some, and leaves others to W.
        late: bytes held from I to W.
    """

    forward: float
    input: float
    weight: float
    backward: float
    state: int
    saved: int
    read: int
    split: int = 0
    late: int = 0


@dataclass(frozen=True, repr=False)
class Profile(NotebookResult):
    """The layers of an nn.Sequential, and the loss behind them, for one chunk.

    Attributes:
        layers: in their order.
        rows: of the chunk.
        unit: of `work`: "s", or "FLOP" where nothing was run.
        device: where it ran; "meta": nowhere.
        entry: (number, bytes) of the storages of the chunk itself, which the caller has.
        loss: of the chunk's output; None: not profiled.
    """

    layers: tuple[LayerProfile, ...]
    rows: int
    unit: WorkUnit
    device: str
    entry: tuple[tuple[int, int], ...]
    loss: LayerProfile | None = None

    @cached_property
    def skips(self) -> tuple[tuple[int, int, int], ...]:
        """For each value that goes past layers the layer that stashes it, the one that pops it, and its bytes."""
        stash_of = {number: at for at, layer in enumerate(self.layers) for number, _ in layer.skips.stashes}
        return tuple((stash_of[number], at, size) for at, layer in enumerate(self.layers)
                     for number, size in layer.skips.pops)

    def stage(self, start: int, stop: int) -> StageProfile:
        """The work and the bytes of layers `start` to `stop - 1` together, without the loss.

        What two of them share (tied weights, what one saves as its output and the next as its input) counts once. The
        first stage does not count the chunk itself, which the caller has.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from partition import profile
            >>> layers = profile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(2, 4))
            >>> layers.stage(0, 3).saved, layers.stage(1, 2).saved, layers.stage(2, 3).read
            (32, 32, 32)
        """
        inside = self.layers[start:stop]
        entry = {number for number, _ in self.entry} if not start else set()
        popped = [size for stash, pop, size in self.skips if stash < start <= pop < stop]
        forward, first, second, backward = (
            sum(getattr(layer.work, action).median for layer in inside) for action in Work._fields
        )
        return StageProfile(
            forward, first, second, backward,
            sum(_states(inside)) + sum(layer.lasting for layer in inside),
            sum_of_bytes(layer.saved.without(entry) for layer in inside),
            (self.layers[start - 1].output if start else 0) + sum(popped),
            *_split(inside, entry),
        )  # fmt: skip

    def loss_bytes(self, start: int) -> int:
        """Bytes that the loss saves on top of a last stage that begins at a layer, while its backward runs."""
        if self.loss is None:
            return 0
        counted = {number for layer in self.layers[start:] for number, _ in layer.saved.shared}
        return self.loss.saved.without(counted).total + self.loss.constants

    def message(self, cut: int) -> int:
        """Bytes of a chunk that pass a cut before layer `cut`: what the layer before returns, and skips."""
        return self.layers[cut - 1].output + sum(size for stash, pop, size in self.skips if stash < cut <= pop)

    def to_json(self) -> str:
        """The profile as text, for `from_json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """The profile that `to_json` has written.

        Raises:
            PartitionError: the text is something else.
        """
        try:
            profile: Profile = typed(cls, json.loads(text))
            profile.skips  # what is taken was stashed
            return profile
        except (ValueError, TypeError, LookupError) as error:
            raise PartitionError(
                f"this is no profile ({type(error).__name__}: {error}). Give what Profile.save or to_json has written."
            ) from None

    def save(self, path: str | Path) -> None:
        """Write the profile to a file of JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read what `save` has written.

        Raises:
            PartitionError: the file has something else in it.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def spelt(self, work: float) -> str:
        """Seconds or FLOPs in words."""
        return spelt_work(work, self.unit)

    def __str__(self) -> str:
        rows = [_COLUMNS, *map(self._row, self.layers)]
        if self.loss is not None:
            rows.append(self._row(self.loss))
        whole = self.stage(0, len(self.layers))
        rows.append((
            "all", "", *map(self.spelt, whole[:4]), *map(spelt_bytes, (*_states(self.layers), whole.saved)), "",
        ))  # fmt: skip
        head = f"a chunk of {self.rows} rows, on {self.device}"
        return "\n".join([head, *aligned(rows, left=2)])

    def _row(self, layer: LayerProfile) -> tuple[str, ...]:
        works = [self._measured(measured) for measured in layer.work]
        sizes = (*(amount.total for amount in (*layer.states, layer.saved)), layer.output)
        return layer.name, layer.kind, *works, *map(spelt_bytes, sizes)

    def _measured(self, measured: MedianSpread) -> str:
        share = f" ±{measured.spread / measured.median / 2:.0%}" if measured.spread and measured.median else ""
        return self.spelt(measured.median) + share


def _states(layers: Sequence[LayerProfile]) -> list[int]:
    """The bytes of parameters, of gradients and of optimizer state that some layers have together."""
    return list(map(sum_of_bytes, zip(*[layer.states for layer in layers])))


def _split(layers: Sequence[LayerProfile], aside: Container[int]) -> tuple[int, int]:
    """The most bytes that some layers hold together while their I runs, and those that they hold after it.

    Args:
        layers: from the last to the first of which I runs.
        aside: numbers of storages that do not count.
    """
    saved = [layer.saved.without(aside) for layer in layers]
    uses = Counter(number for amount in saved for number, _ in amount.shared)
    current, peak = sum_of_bytes(saved), 0
    for layer, amount in zip(reversed(layers), reversed(saved)):
        peak = max(peak, current + layer.waits.rise)
        current += layer.waits.gradients + layer.waits.inputs.own - amount.own
        stays = dict(layer.waits.inputs.shared)
        for number, size in amount.shared:
            if number not in stays:
                uses[number] -= 1
                current -= size * (not uses[number])
    return peak, current


_COLUMNS = ("layer", "kind", "F", "I", "W", "B", "parameters", "gradients", "optimizer", "saved", "output")
