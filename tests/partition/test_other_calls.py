"""Calls that take another way through a model's forward than its sample: the parts compute the same, or refuse."""

import copy
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partition import PartitionError, to_sequential
from pipeline import Pipe

WIDE = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor, factor: Any = 1.0) -> Tensor:
        return x + (self.linear(x) * 1.7).sin() * factor


class Base(nn.Module):
    """An embedding, blocks and a head. A model says how it calls its blocks."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def between(self, h: Tensor, number: int, x: Tensor, other: Any) -> Tensor:
        return h

    def given(self, x: Tensor, other: Any) -> tuple[Any, ...]:
        return ()

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        h, given = self.embed(x), self.given(x, other)
        for number, block in enumerate(self.blocks):
            h = block(self.between(h, number, x, other), *given)
        return self.head(h)  # type: ignore[no-any-return]  # a Tensor


def is_long(x: Tensor) -> bool:
    return x.shape[1] > 5


def rows(length: int = 5) -> Tensor:
    return torch.randn(4, length, WIDE, generator=torch.Generator().manual_seed(length))


def sequential(model: nn.Module, sample: Any) -> nn.Sequential:
    return to_sequential(model, sample)


def piped(model: nn.Module, sample: Any) -> nn.Module:
    return Pipe(model, sample=sample, chunks=2, devices=["cpu"] * 2)


WAYS = pytest.mark.parametrize("cut", [sequential, piped])


# ------------------------------------------------------------------------------------------ what blocks are called with


class Returning(Block):
    """A block within which a module returns what it was given, as dropout does in eval mode."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, table):
        return super().forward(x, self.dropout(table)[: x.shape[1]])


@WAYS
def test_a_table_that_modules_in_blocks_return_is_still_the_models_parameter(cut):
    class Tabled(Base):
        def __init__(self):
            super().__init__(Returning)
            self.table = nn.Embedding(9, WIDE)

        def given(self, x, other):
            return (self.table.weight,)

    model = Tabled().eval()
    parts, plain = cut(model, rows()), copy.deepcopy(model)
    for length in (5, 7):
        outputs, expected = parts(rows(length)), plain(rows(length))
        torch.testing.assert_close(outputs, expected)
        for output in (outputs, expected):
            output.square().sum().backward()
        torch.testing.assert_close(model.table.weight.grad, plain.table.weight.grad)


class Writing(Block):
    """A block that writes into an object, and goes by what is there."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x, written):
        return super().forward(x, self.write(self, written))


class Writers(Base):
    def __init__(self, make, write):
        super().__init__(lambda: Writing(write))
        self.make = make

    def given(self, x, other):
        return (self.make(),)


def counted(block, written):
    written.count += 1
    return written.count


def ticking(state):
    return lambda: counted(None, state)


def queued(block, written):
    written.append(0.5)
    return len(written)


def unless_seen(block, written):
    factor = 1 + len({id(block)} & written)
    written.add(id(block))
    return factor


BY_OTHERS = {
    "an object": (lambda: SimpleNamespace(count=0), counted, "SimpleNamespace: what one writes there, others do not s"),
    "an iterator": (lambda: iter((0.5, 1.0, 1.5)), lambda _, numbers: next(numbers), "tuple_iterator: what one writes"),
    "a method": (lambda: iter((0.5, 1.0, 1.5)).__next__, lambda _, draw: draw(), "method-wrapper: what one writes"),
    "a closure": (lambda: ticking(SimpleNamespace(count=0)), lambda _, tick: tick(), "function: what one writes there"),
    "a list": (list, queued, "does not return on the sample what its parts return"),
    "a queue": (deque, queued, "does not return on the sample what its parts return"),
    "a tuple of queues": (lambda: (deque(),), lambda block, of: queued(block, *of), "does not return on the sample wh"),
}


@pytest.mark.parametrize("what", BY_OTHERS)
def test_blocks_that_go_by_what_others_wrote_into_an_object_are_refused(what):
    make, write, words = BY_OTHERS[what]
    with pytest.raises(PartitionError, match=words):
        to_sequential(Writers(make, write), rows())


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_what_a_block_writes_into_an_object_is_not_there_in_the_next_chunk(checkpoint):
    model, x, target = Writers(set, unless_seen), rows(), rows(WIDE)[:, :5]
    plain = copy.deepcopy(model)
    pipe = Pipe(model, sample=x, chunks=4, devices=["cpu"] * 2, checkpoint=checkpoint)
    F.mse_loss(plain(x), target).backward()
    for _ in range(3):
        model.zero_grad()
        pipe.step(x, target, loss_fn=nn.MSELoss())
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


class Settled(Block):
    """A block that goes by what is set elsewhere than in its arguments."""

    settings: ClassVar[dict[str, Any]] = {}

    def forward(self, x):
        return super().forward(x, self.settings["scale"])


class Settles(Base):
    """A model that sets something of its input there."""

    def __init__(self, settings):
        super().__init__(Settled)
        for block in [] if settings is None else self.blocks:
            block.settings = settings

    def forward(self, x, other=None):
        self.blocks[0].settings["scale"] = (x[:, :1, :1] > 0).to(x.dtype) + x.shape[1] / 5
        return super().forward(x)


@pytest.mark.parametrize("settings", [None, {}], ids=["of a class", "of blocks"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "looped-bfs", "zb-v"])
def test_blocks_find_what_the_models_forward_has_set_elsewhere_for_their_chunk(schedule, checkpoint, settings):
    model = Settles(settings)
    plain = copy.deepcopy(model)
    pipe = Pipe(model, [1, 1, 1, 2], 4, sample=rows(), devices=["cpu"] * 4, schedule=schedule, checkpoint=checkpoint)
    for length in (5, 5, 7, 5, 5):
        x, target = rows(length), rows(length).flip(0)
        model.zero_grad()
        plain.zero_grad()
        losses = [F.mse_loss(plain(part), goal) for part, goal in zip(x.split(1), target.split(1), strict=True)]
        torch.stack(losses).mean().backward()
        pipe.step(x, target, loss_fn=nn.MSELoss())
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


class Grows(nn.Module):
    """A table that a longer text makes anew, and stretches: a shorter one finds it so."""

    def __init__(self, length, register):
        super().__init__()
        self.length, self.register = 0, register
        self.grow(length)

    def grow(self, length):
        table = (1 + torch.arange(length)[:, None] / 10) * length / 20
        if self.register or not self.length:
            self.register_buffer("table", table, persistent=False)
        else:
            self.table = table
        self.length = length

    def forward(self, x):
        if x.shape[1] > self.length:
            self.grow(x.shape[1])
        return self.table[: x.shape[1]]


class GrowsForAll(Base):
    """A model with a table for all blocks."""

    def __init__(self, length, register):
        super().__init__()
        self.table = Grows(length, register)

    def given(self, x, other):
        return (self.table(x),)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("register", [False, True])
@pytest.mark.parametrize("length", [5, 6, 20])
def test_a_table_that_a_long_text_has_stretched_stays_so_in_later_calls(length, register, checkpoint):
    model = GrowsForAll(length, register)
    plain = copy.deepcopy(model)
    pipe = Pipe(model, [2, 1, 2], 2, sample=rows(), devices=["cpu"] * 3, checkpoint=checkpoint)
    for later in (5, 7, 3, 9, 4):
        model.zero_grad()
        plain.zero_grad()
        for module in (plain, pipe):
            output = module(rows(later))
            output.square().mean().backward()
        torch.testing.assert_close(output, plain(rows(later)))
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


class CountsInTraining(nn.Module):
    """A factor that grows after some calls in train mode."""

    count = 0

    def forward(self):
        self.count += self.training
        return 1.0 if self.count < 50 else 2.0


class Warms(Base):
    """A model that counts its calls, in a place that its class or it itself has; or one of its modules does."""

    count = 0

    def __init__(self, where):
        super().__init__()
        self.where, self.counts, self.factor = where, {"calls": 0}, CountsInTraining()

    def forward(self, x, other=None):
        if self.where == "factor.count":
            return super().forward(x)
        if self.where == "count":
            self.count += 1
        else:
            self.counts["calls"] += 1
        return super().forward(x) * (1.0 if self.count + self.counts["calls"] < 50 else 2.0)

    def given(self, x, other):
        return (self.factor(),) if self.where == "factor.count" else ()


@pytest.mark.parametrize("where", ["count", "counts", "factor.count"])
def test_a_model_that_counts_its_calls_is_refused_though_it_goes_by_that_in_later_ones_alone(where):
    model = Warms(where)
    with pytest.raises(PartitionError, match=f"the forward of Warms keeps '{where}' from one call to the next"):
        to_sequential(model, rows())
    assert (model.count, model.counts, model.factor.count) == (0, {"calls": 0}, 0)


@WAYS
def test_modules_that_are_in_one_part_may_count(cut):
    class Warm(Block):
        count = 0

        def forward(self, x):
            self.count += 1
            return super().forward(x)

    model = Base(Warm)
    parts = cut(model, rows())
    parts(rows())
    assert [block.count for block in model.blocks] == [2 if isinstance(parts, Pipe) else 1] * 3


class Noting(nn.Linear):
    """A layer that notes whether it has seen a long text."""

    is_long = False

    def forward(self, x):
        self.is_long = is_long(x)
        return super().forward(x)


class NotingBlock(Block):
    is_long = None

    def forward(self, x, factor=1.0):
        if is_long(x):
            self.is_long = True
        return super().forward(x, factor)


class ReadsNotes(Base):
    """A model that reads there whether the text is long: of its embedding, or of a block."""

    def __init__(self, of_block, is_for_blocks):
        super().__init__(NotingBlock)
        self.embed, self.of_block, self.is_for_blocks = Noting(WIDE, WIDE), of_block, is_for_blocks

    def factor(self):
        return 2.0 if (self.blocks[1] if self.of_block else self.embed).is_long else 1.0

    def given(self, x, other):
        return (self.factor(),) if self.is_for_blocks else ()

    def forward(self, x, other=None):
        y = super().forward(x)
        return y if self.is_for_blocks else y * self.factor()


@WAYS
@pytest.mark.parametrize(("of_block", "is_for_blocks"), [(False, False), (False, True), (True, False)])
def test_what_a_module_notes_of_a_call_and_the_model_reads_in_another_part_is_refused(of_block, is_for_blocks, cut):
    model = ReadsNotes(of_block, is_for_blocks)
    plain, parts = copy.deepcopy(model), cut(model, rows())
    torch.testing.assert_close(parts(rows()), plain(rows()))
    words = f"'{'blocks.1' if of_block else 'embed'}' sets its attribute 'is_long', which the model's own forward reads"
    with pytest.raises(PartitionError, match=words):
        parts(rows(7))


class ReadsParent(Block):
    def forward(self, x):
        return super().forward(x, self.parent[0].length / 5)


class SetsForBlocks(Base):
    """A model that sets something on itself, where its blocks find it by a reference: on the sample what was there."""

    def __init__(self):
        super().__init__(ReadsParent)
        self.length = 5
        for block in self.blocks:
            block.parent = (self,)

    def forward(self, x, other=None):
        self.length = x.shape[1]
        return super().forward(x)


def test_blocks_that_read_what_the_models_forward_sets_on_the_model_are_refused():
    with pytest.raises(PartitionError, match="module 'blocks.[012]' reads 'length' of SetsForBlocks, whose forward se"):
        to_sequential(SetsForBlocks(), rows())


# ------------------------------------------------------------------------------------------------- between two blocks


class Masked(Base):
    def between(self, h, number, x, other):
        return h if other is None else h.masked_fill(other[..., None], 0)


class Written(Base):
    def between(self, h, number, x, other):
        return h.add_(1) if is_long(x) and number == 1 else h


class Detached(Base):
    def between(self, h, number, x, other):
        return h.detach() if is_long(x) and number == 2 else h


class Padded(Base):
    def between(self, h, number, x, other):
        return F.pad(h, (0, 0, 0, 1)) if number == 1 and is_long(x) else h


class FromInput(Base):
    def between(self, h, number, x, other):
        return x if is_long(x) and number == 1 else h


class FromEarlier(Base):
    """A long call calls a block with what the last but one returned."""

    def forward(self, x, other=None):
        states = [self.embed(x)]
        for number, block in enumerate(self.blocks):
            states.append(block(states[-2 if is_long(x) and number == 2 else -1]))
        return self.head(states[-1])


BETWEEN = {
    "an input": (FromInput, rows(), rows(7)),
    "what an earlier block returned": (FromEarlier, rows(), rows(7)),
    "a mask": (Masked, (rows(), None), (rows(), torch.ones(4, 5) > 0)),
    "written in place": (Written, rows(), rows(7)),
    "detached": (Detached, rows(), rows(7)),
    "padded": (Padded, rows(), rows(8)),
}


@WAYS
@pytest.mark.parametrize("what", BETWEEN)
def test_what_is_computed_between_two_blocks_and_was_not_on_the_sample_is_refused(what, cut):
    kind, sample, other = BETWEEN[what]
    model = kind()
    parts = cut(model, sample)
    torch.testing.assert_close(parts(sample), model(*sample) if isinstance(sample, tuple) else model(sample))
    with pytest.raises(PartitionError, match=r"block 'blocks\.\d' is not called with what block 'blocks\.\d' returned"):
        parts(other)


class Collected(Base):
    """What blocks return is added up; a short call writes into it, a long one into half of it."""

    def forward(self, x, other=None):
        h, collected = self.embed(x), []
        for block in self.blocks:
            h = block(h)
            collected.append(h)
            h = h / 2 if is_long(x) else h
            h += 1
        return self.head(h + sum(collected))


@WAYS
def test_a_write_into_what_another_part_reads_is_refused_where_the_sample_did_not_show_it(cut):
    model, short, long = Collected(), rows(5), rows(7)
    parts = cut(model, short)
    for x in (short, long):
        torch.testing.assert_close(parts(x), model(x))
    with pytest.raises(PartitionError, match="writes into what a block returned, .* Another part reads that: write to"):
        cut(model, long)(short)


class WritesItsInput(Block):
    """A block that scales a long input in place."""

    def forward(self, x: Tensor, factor: Any = 1.0) -> Tensor:
        return super().forward(x.mul_(1.1) if is_long(x) else x, factor)


class OfTheFirst(Base):
    """What its blocks are given is made of their first input."""

    def __init__(self) -> None:
        super().__init__(WritesItsInput)

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        h = self.embed(x)
        factors = torch.arange(8.0)[None, :, None] * h.mean((1, 2), keepdim=True)
        for block in self.blocks:
            h = block(h, factors[:, : h.shape[1]].mean(1, keepdim=True))
        return self.head(h)  # type: ignore[no-any-return]  # a Tensor


@WAYS
@torch.no_grad()
def test_a_block_that_writes_what_later_arguments_are_made_of_is_refused(cut):
    model, short, long = OfTheFirst(), rows(5), rows(7)
    parts = cut(model, short)
    torch.testing.assert_close(parts(short), model(short))
    for call in (lambda: parts(long), lambda: cut(model, long)):
        with pytest.raises(PartitionError, match=r"block 'blocks\.0' writes into what .* another part reads.* Let"):
            call()


class FirstAgain(Base):
    """What its first block is called with is read again behind the second; it is made of the input alone."""

    def __init__(self) -> None:
        super().__init__(WritesItsInput)

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        h = first = x * 1.0
        for number, block in enumerate(self.blocks):
            h = block(h) + (first if number == 1 else 0)
        return self.head(h)  # type: ignore[no-any-return]  # a Tensor


class WritesTheFactor(Block):
    """A block that scales in place what it shares with others, for a long input."""

    def forward(self, x: Tensor, factor: Any = 1.0) -> Tensor:
        return super().forward(x, factor.mul_(1.1) if is_long(x) else factor)


class SharedFactor(Base):
    def __init__(self) -> None:
        super().__init__(WritesTheFactor)

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        h, factor = self.embed(x), x.mean((1, 2), keepdim=True)
        for block in self.blocks:
            h = block(h, factor)
        return self.head(h)  # type: ignore[no-any-return]  # a Tensor


@pytest.mark.parametrize("in_first", range(5))
@pytest.mark.parametrize("kind", (FirstAgain, SharedFactor))
@torch.no_grad()
def test_a_block_that_writes_what_it_is_called_with_as_it_did_not_on_the_sample_is_refused(kind, in_first):
    model, short, long = kind(), rows(5), rows(7)
    layers = to_sequential(model, short, blocks="blocks")
    balance = [in_first, len(layers) - in_first] if in_first else [1] * len(layers)
    pipe = Pipe(layers, balance, chunks=2)
    torch.testing.assert_close(pipe(short), model(short))
    with pytest.raises(PartitionError, match=r"block 'blocks\.0' writes .* copy: h = h.clone\(\)\. Cut .* like this"):
        pipe(long)


@WAYS
@torch.no_grad()
def test_a_block_may_write_its_hidden_state_in_place_as_on_the_sample(cut):
    model, short, long = Base(WritesItsInput), rows(5), rows(7)
    parts = cut(model, long)
    for x in (long, short):
        torch.testing.assert_close(parts(x), model(x))


def test_an_input_that_blocks_are_called_with_does_not_go_past_them():
    class Averages(Base):
        def forward(self, x, average=False):
            h, found = x, []
            for block in self.blocks:
                h = block(h)
                found.append(h)
            return self.head(torch.stack(found).mean(0) if average else h) + x

    parts = to_sequential(Averages(), (rows(), False))
    with pytest.raises(PartitionError, match="the output is computed from what another part .* like this call"):
        parts((rows(), True))


class Switching(Base):
    """By a number of the input, blocks or the end are given what `how` makes of the embedding."""

    def __init__(self, how: Callable[[Tensor], Tensor], at_end: bool) -> None:
        super().__init__()
        self.how, self.at_end = how, at_end

    def forward(self, x, other=None):
        h = self.embed(x)
        made = self.how(h) if x.max() > 50 else 1.0
        for block in self.blocks:
            h = block(h) if self.at_end or isinstance(made, float) else block(h, made)
        return self.head(h) * (made if self.at_end else 1.0)


HOW = {
    "as it is": lambda h: h, "computed": torch.tanh, "a mask": lambda h: h > 0, "a part": lambda h: h[..., :1],
    "whole numbers": lambda h: h.argmax(-1, keepdim=True), "chosen": lambda h: torch.where(h > 0, 1.0, 2.0),
    "written": lambda h: h.mul_(2), "copied": lambda h: torch.zeros_like(h).copy_(h), "set": lambda h: with_part(h),
    "added": lambda h: three().expand_as(h).clone().add_(h),
}  # fmt: skip


def with_part(h: Tensor) -> Tensor:
    made = torch.zeros(h.shape)
    made[:, :1][:, 0] = h[:, 0]
    return made


@WAYS
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_what_another_part_computes_is_refused_where_only_a_later_call_needs_it(how, at_end, cut):
    model, x = Switching(HOW[how], at_end).eval(), rows()
    parts = cut(model, x)
    torch.testing.assert_close(parts(x), model(x))
    where = "the output" if at_end else "argument ('factor'|1) of block 'blocks.0'"
    with pytest.raises(PartitionError, match=f"{where} is computed from what another part .* like this call"):
        parts(100 * x)


SHAPES = {
    "zeros_like": lambda h: torch.zeros_like(h) + 3, "new": lambda h: h.new_full((1,), 3.0),
    "to": lambda h: three().to(h), "expand_as": lambda h: three().expand_as(h), "type_as": lambda h: three().type_as(h),
    "size": lambda h: three() * h.size(1),
}  # fmt: skip


def three() -> Tensor:
    return torch.full((1,), 3.0)


@WAYS
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("how", SHAPES)
def test_the_shape_and_type_of_what_another_part_computes_are_here(how, at_end, cut):
    model, x = Switching(SHAPES[how], at_end).eval(), rows()
    parts = cut(model, x)
    for factor in (1, 100):
        torch.testing.assert_close(parts(factor * x), model(factor * x))


# ---------------------------------------------------------------------------------------------- what blocks are given


class Scaled(Base):
    """Blocks are called with what is made of an input, of a buffer and of a number that nobody watches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.rand(WIDE))
        self.config = {"scale": 1.0}

    def given(self, x, other):
        return ((self.slopes * self.config["scale"]) * (x if other is None else other[:, None]).sin(),)


@WAYS
def test_what_blocks_are_given_is_made_anew_in_each_call(cut):
    model, x = Scaled(), rows()
    parts = cut(model, x)
    for scale in (1.0, 0.5):
        model.config["scale"] = scale
        torch.testing.assert_close(parts(x), model(x))
    with torch.no_grad():
        model.slopes.mul_(3)
    torch.testing.assert_close(parts(x), model(x))
    model.load_state_dict(Scaled().state_dict())
    torch.testing.assert_close(parts(x), model(x))


class Waves(nn.Module):
    """A module without parameters, with all kinds of attributes."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.sizes, self.phase = config, {"amplitude": 1.0}, torch.rand(WIDE)
        self.scale: float | None = None
        self.act = torch.sin
        self.tables: dict[int, Tensor] = {}

    def forward(self, length: int) -> Tensor:
        table = self.tables.setdefault(length, torch.arange(length)[:, None] + torch.zeros(WIDE))
        waves = self.act(table * self.config.speed + self.phase) * self.sizes["amplitude"]
        return waves if self.scale is None else waves * self.scale


class Waving(Base):
    def __init__(self) -> None:
        super().__init__()
        self.waves = Waves(SimpleNamespace(speed=1.0))

    def given(self, x, other):
        return (self.waves(x.shape[1]),)


def halved(module: nn.Module, args: Any, returned: Tensor) -> Tensor:
    return returned / 2


SET = {
    "a field of its config": lambda waves: setattr(waves.config, "speed", 2.0),
    "its config": lambda waves: setattr(waves, "config", SimpleNamespace(speed=3.0)),
    "an entry": lambda waves: waves.sizes.update(amplitude=0.5),
    "a dict": lambda waves: setattr(waves, "sizes", {"amplitude": 3.0}),
    "numbers of a tensor": lambda waves: waves.phase.mul_(2),
    "a tensor": lambda waves: setattr(waves, "phase", torch.zeros(WIDE)),
    "a number for None": lambda waves: setattr(waves, "scale", 0.3),
    "None for a number": lambda waves: setattr(waves, "scale", None),
    "a function": lambda waves: setattr(waves, "act", torch.cos),
    "a hook": lambda waves: waves.register_forward_hook(halved),
}


@WAYS
def test_blocks_are_given_what_a_module_makes_with_what_is_set_on_it_meanwhile(cut):
    model, x = Waving(), rows()
    parts, plain = cut(model, x), copy.deepcopy(model)
    for what, change in SET.items():
        for each in (model, plain):
            change(each.waves)
        torch.testing.assert_close(parts(x), plain(x), msg=lambda text: f"{what}: {text}")
        assert model.waves.tables.keys() == plain.waves.tables.keys()


class Ignoring(Block):
    def forward(self, x, mask):
        return super().forward(x)


class Told(Base):
    """What blocks are called with is decided by numbers of blocks; they do not read it."""

    def __init__(self) -> None:
        super().__init__(Ignoring)

    def between(self, h, number, x, other):
        return h / 2 if (h > 9).any() else h

    def given(self, x, other):
        return (other,)


@WAYS
def test_an_input_that_blocks_are_called_with_and_do_not_read_may_travel(cut):
    model, x = Told(), (rows(), torch.ones(4, 5) > 0)
    torch.testing.assert_close(cut(model, x)(x), model(*x))


class Listing(Block):
    def forward(self, x, factors):
        return super().forward(x, factors[0])


class Changing(Base):
    """Blocks are given what is made of the embedding, or of a shape; in long calls it changes from one to the next."""

    def __init__(self, how: Callable[[list[Tensor]], object], of_embedding: bool) -> None:
        super().__init__(Listing)
        self.how, self.of_embedding = how, of_embedding

    def forward(self, x, other=None):
        h = self.embed(x)
        factors = [h.sin() if self.of_embedding else torch.arange(x.shape[1])[:, None] / 9]
        for block in self.blocks:
            h = block(h, factors)
            if is_long(x):
                self.how(factors)
        return self.head(h)


def replace(factors: list[Tensor]) -> None:
    factors[0] = factors[0] / 2


def write(factors: list[Tensor]) -> None:
    factors[0].div_(2)


@WAYS
@pytest.mark.parametrize("how, of_embedding", [(replace, True), (write, True), (write, False)])
def test_what_blocks_are_given_does_not_change_between_them(how, of_embedding, cut):
    parts = cut(Changing(how, of_embedding), rows())
    with pytest.raises(PartitionError, match=r"argument 1 of block 'blocks\.\d' changes between two blocks: it is"):
        parts(rows(7))


@WAYS
def test_each_block_is_given_what_the_list_of_its_arguments_held_as_it_was_called(cut):
    model = Changing(replace, False)
    for sample in (rows(), rows(7)):
        torch.testing.assert_close(cut(model, sample)(rows(7)), model(rows(7)))


class Otherwise(Block):
    """A block that returns something else in long calls."""

    short: Callable[[Tensor], Any]
    long: Callable[[Tensor], Any]

    def forward(self, state):
        h = tree_leaves(state)[0] if isinstance(state, dict | tuple) else state
        return (self.long if is_long(h) else self.short)(super().forward(h))


OTHERWISE = {
    "entries in another order": (lambda h: {"h": h, "n": -h}, lambda h: {"n": -h, "h": h}, "other containers than on"),
    "fewer": (lambda h: (h, -h), lambda h: (h,), "other containers than on the sample"),
    "a tuple": (lambda h: h, lambda h: (h, -h), "other containers than on the sample"),
    "a tensor for a number": (lambda h: (h, 2.0), lambda h: (h, -h), "a tensor, and 2.0 on the sample"),
    "a number for a tensor": (lambda h: (h, -h), lambda h: (h, 2.0), "2.0, and a tensor on the sample"),
    "None for a number": (lambda h: (h, 2.0), lambda h: (h, None), "None, and 2.0 on the sample"),
}


@WAYS
@pytest.mark.parametrize("what", OTHERWISE)
def test_a_block_that_returns_something_else_than_on_the_sample_is_refused(what, cut):
    short, long, words = OTHERWISE[what]

    class Ends(Base):
        def forward(self, x, other=None):
            h, beside = self.embed(x), 0
            for block in self.blocks:
                h = block(h)
                beside = beside + h[1] if isinstance(h, tuple) else 0
            return (h["h"] - h["n"] if isinstance(h, dict) else h[0] if isinstance(h, tuple) else h) + beside

    model = Ends(Otherwise)
    for block in model.blocks:
        block.short, block.long = short, long
    parts = cut(model, rows())
    torch.testing.assert_close(parts(rows()), model(rows()))
    with pytest.raises(PartitionError, match=f"block 'blocks.0' returned {words}"):
        parts(rows(7))


@WAYS
def test_a_block_that_is_called_without_an_argument_of_the_sample_is_refused(cut):
    class Fewer(Base):
        def given(self, x, other):
            return () if is_long(x) else (self.embed(x).sin(),)

    with pytest.raises(PartitionError, match="a block is called without argument 1, with which it was called on the"):
        cut(Fewer(), rows())(rows(7))


class Noisy(Base):
    """Draws noise where it is given none, for the beginning, and for its blocks or the end."""

    def __init__(self, to_blocks: bool) -> None:
        super().__init__()
        self.to_blocks = to_blocks

    def forward(self, x, noise=None):
        noise = torch.randn_like(x) if noise is None else noise
        h = self.embed(x) + noise
        for block in self.blocks:
            h = block(h, noise if self.to_blocks else 1.0)
        return self.head(h) - (0 if self.to_blocks else noise)


@WAYS
@pytest.mark.parametrize("to_blocks", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_call_that_draws_what_the_sample_did_not_is_refused(training, to_blocks, cut):
    model, sample = Noisy(to_blocks).train(training), (rows(), rows())
    parts = cut(model, sample)
    torch.testing.assert_close(parts(sample), model(*sample))
    with pytest.raises(PartitionError, match="draws random numbers, which it did not on the sample"):
        parts((rows(), None))


@WAYS
def test_gradients_reach_inputs_through_what_blocks_are_given(cut):
    model, sample = Scaled(), (rows(), torch.rand(4, WIDE))
    parts, encoder, found = cut(model, sample), nn.Linear(WIDE, WIDE), []
    for module in (lambda x: model(*x), parts):
        encoder.zero_grad()
        x = rows().requires_grad_()
        module((x, encoder(sample[1]))).square().sum().backward()
        found.append([x.grad, encoder.weight.grad])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@WAYS
def test_gradients_reach_an_input_that_is_read_twice(cut):
    model, found = Scaled(), []
    parts = cut(model, rows())
    for module in (model, parts):
        x = rows().requires_grad_()
        found.append(torch.autograd.grad(module(x).square().sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class Fourier(nn.Module):
    """A module without parameters."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.randn(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.waves).sin() * self.factor


class Follows(Base):
    """Blocks are given what such a module makes; the model reads a number of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.fourier = Fourier()
        for block in self.blocks:
            block.scale = 0.5

    def given(self, x, other):
        return (self.fourier(x),)

    def forward(self, x, other=None):
        h, given = self.embed(x), self.given(x, other)
        for block in self.blocks:
            h = h + block(h, *given) * block.scale
        return self.head(h) * self.embed.out_features


@WAYS
def test_parts_follow_what_is_set_and_loaded_in_modules_beside_them(cut):
    model, x = Follows(), rows()
    parts = cut(model, x)
    for change in (
        lambda: setattr(model.blocks[1], "scale", 0.1),
        lambda: setattr(model.fourier, "factor", 3.0),
        lambda: setattr(model.fourier, "waves", torch.rand(WIDE)),
        lambda: model.load_state_dict({**Follows().state_dict(), "fourier.waves": torch.ones(WIDE)}),
        lambda: parts.load_state_dict({**Follows().state_dict(), "fourier.waves": torch.full((WIDE,), 2.0)}),
    ):
        change()
        torch.testing.assert_close(parts(x), model(x))


class Normalised(Base):
    """A buffer of the model itself is read before the blocks and behind them; and written, but not on the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(WIDE))

    def forward(self, x, other=None):
        if is_long(x):
            self.mean.mul_(0.9)
        return super().forward(x - self.mean) + self.mean


@WAYS
def test_a_buffer_is_read_in_several_parts(cut):
    model, x = Normalised(), rows()
    parts = cut(model, x)
    for change in (
        lambda: None,
        lambda: model.load_state_dict(Normalised().state_dict()),
        lambda: parts.load_state_dict(Normalised().state_dict()),
        lambda: model.mean.mul_(2),
    ):
        change()
        torch.testing.assert_close(parts(x), model(x))
    with pytest.raises(PartitionError, match="own forward keeps 'mean' from one call to the next, and each"):
        parts(rows(7))


@WAYS
@pytest.mark.parametrize("first", [0.0, None])
def test_what_a_later_call_alone_reads_of_the_call_before_is_refused(cut, first):
    class Remembers(Base):
        def __init__(self):
            super().__init__()
            self.last = first

        def forward(self, x, other=None):
            h = super().forward(x + (self.last or 0.0) if is_long(x) else x)
            self.last = h.detach().mean().item()
            return h

    parts = cut(Remembers(), rows())
    parts(rows(4))
    with pytest.raises(PartitionError, match="own forward keeps 'last' from one call to the next, and each part"):
        parts(rows(7))


@WAYS
@pytest.mark.parametrize("longest", [5, torch.tensor(5), nn.Buffer(torch.tensor(5), persistent=False)])
def test_what_a_later_call_alone_keeps_is_refused(cut, longest):
    class Grows(Base):
        def __init__(self):
            super().__init__()
            self.longest = longest

        def forward(self, x, other=None):
            if x.shape[1] > self.longest:
                self.longest = self.longest + x.shape[1]
            return super().forward(x / self.longest)

    model = Grows()
    parts = cut(model, rows())
    torch.testing.assert_close(parts(rows(4)), model(rows(4)))
    with pytest.raises(PartitionError, match="own forward keeps 'longest' from one call to the next, and each part"):
        parts(rows(7))


@WAYS
def test_a_module_that_several_parts_call_follows_what_is_set_on_it(cut):
    class Slopes(nn.LeakyReLU):
        pass

    class Sloped(Base):
        def __init__(self):
            super().__init__()
            self.slopes = Slopes(0.5)

        def forward(self, x, other=None):
            return self.slopes(super().forward(self.slopes(x)))

    model, x = Sloped(), rows()
    parts = cut(model, x)
    model.slopes.negative_slope = 0.1
    torch.testing.assert_close(copy.deepcopy(parts)(x), model(x))
    torch.testing.assert_close(parts(x), model(x))
    own = [each for each in parts.modules() if isinstance(each, Slopes)]
    for each in own:  # as a script sets all dropout
        each.negative_slope = 0.3
    torch.testing.assert_close(parts(x), model(x))
    assert {each.negative_slope for each in own} == {0.3} and len(own) == 2


class Steps(Base):
    """Blocks are called again and again, each time with a row of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Embedding(4, WIDE)

    def forward(self, x, other=None):
        h = self.embed(x)
        for number in range(3):
            for block in self.blocks:
                h = block(h, self.steps.weight[number])
        return self.head(h)


@WAYS
@pytest.mark.parametrize("is_frozen", [True, False])
def test_blocks_are_called_with_rows_of_a_parameter(cut, is_frozen):
    model, x = Steps(), rows()
    model.steps.requires_grad_(not is_frozen)
    version = model.steps.weight._version
    parts = cut(model, x)
    found = []
    for module in (parts, model):
        model.zero_grad()
        module(x).square().sum().backward()
        found.append([each.grad for each in model.parameters() if each.requires_grad])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert model.steps.weight._version == version


class Pair(Block):
    def forward(self, x, factor=1.0):
        h = super().forward(x, factor)
        return h, h * 2


class Gathers(Base):
    """It gathers what blocks return beside, as far as they do. A long call reads that."""

    def __init__(self):
        super().__init__(Pair)

    def forward(self, x, other=None):
        h, gathered = self.embed(x), []
        for block in self.blocks:
            h, beside = block(h)
            gathered += [] if beside is None else [beside]
        return self.head(h + sum(gathered) if is_long(x) else h) * len(gathered)


@WAYS
def test_what_blocks_return_beside_is_there_for_all_parts_and_refused_where_a_later_call_alone_reads_it(cut):
    model = Gathers()
    parts = cut(model, rows())
    torch.testing.assert_close(parts(rows(4)), model(rows(4)))
    assert len(to_sequential(model, rows())) == 5
    with pytest.raises(PartitionError, match="the output is computed from what another part of the model computes"):
        parts(rows(7))


class Shallow(Base):
    """Its last block is not called."""

    def forward(self, x, other=None):
        h = self.embed(x)
        for block in self.blocks[:-1]:
            h = block(h)
        return self.head(h)


def test_a_row_of_which_not_all_are_called_is_a_row_of_blocks():
    model = Shallow()
    layers = to_sequential(model, rows())
    names = [layer.in_model.names for layer in layers]
    assert names == [("embed",), ("blocks.0",), ("blocks.1",), ("head", "blocks.2")]
    assert torch.equal(layers(rows(7)), model(rows(7))) and list(layers.state_dict()) == list(model.state_dict())


class Prompts(Base):
    """Blocks are called with a parameter, which the model returns as well; between two it may be read."""

    def __init__(self, is_read):
        super().__init__()
        self.is_read, self.prompt = is_read, nn.Parameter(torch.rand(WIDE))

    def between(self, h, number, x, other):
        return h * self.prompt if self.is_read and number == 1 else h

    def given(self, x, other):
        return (self.prompt,)

    def forward(self, x, other=None):
        return super().forward(x), self.prompt


@pytest.mark.parametrize("is_read, count", [(False, 5), (True, 9)])
def test_a_parameter_that_blocks_are_called_with_may_be_returned(is_read, count):
    model = Prompts(is_read)
    layers = to_sequential(model, rows())
    found = []
    for module in (layers, model):
        model.zero_grad()
        output, prompt = module(rows(7))
        (output * prompt).square().sum().backward()
        found.append((output, prompt, [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(*found)
    assert len(layers) == count


class Prompted(Prompts):
    """A long call has the parameter itself where a short one has what is made of it."""

    def forward(self, x, other=None):
        factor = self.prompt if is_long(x) else self.prompt * 2
        h = self.embed(x)
        for number, block in enumerate(self.blocks):
            h = block(self.between(h, number, x, other), factor)
        return self.head(h) * factor


@WAYS
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_no_part_writes_what_another_computed_into_a_parameter(cut, is_read, is_frozen):
    model = Prompted(is_read)
    model.prompt.requires_grad_(not is_frozen)
    prompt, version = model.prompt.detach().clone(), model.prompt._version
    parts = cut(model, rows())
    with pytest.raises(PartitionError, match="the output is computed from what another part of the model computes"):
        parts(rows(7))
    torch.testing.assert_close(parts(rows()), model(rows()))
    assert torch.equal(model.prompt, prompt) and model.prompt._version == version


def test_copies_of_parts_begin_in_the_modes_that_the_model_was_told():
    class Drops(Base):
        def forward(self, x, other=None):
            return F.dropout(super().forward(x), 0.5, self.training)

    model, x = Drops().eval(), rows()
    parts = to_sequential(model, x)
    model.train()
    copied = copy.deepcopy(parts)
    for module in (model, copied):
        torch.manual_seed(0)
        assert (module(x) == 0).any()
    model.eval()
    torch.testing.assert_close(copy.deepcopy(parts)(x), model(x))


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch's, as it reads one
def test_parts_can_be_saved_whole(tmp_path):
    model, x = Follows(), rows()
    parts = to_sequential(model, x)
    parts(x)
    torch.save(parts, tmp_path / "parts.pt")
    torch.testing.assert_close(torch.load(tmp_path / "parts.pt", weights_only=False)(x), parts(x))


class Expanded(Base):
    """What the beginning computes of a condition is expanded to the length, which the sample may not show."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(WIDE, WIDE)

    def forward(self, x, other=None):
        h, c = self.embed(x), self.condition(other)[:, None].expand(-1, x.shape[1], -1)
        for block in self.blocks:
            h = block(h, c)
        return self.head(h) * c


@pytest.mark.parametrize("length", [1, 5])
def test_what_is_expanded_for_the_blocks_is_there_behind_them(length):
    model, condition = Expanded(), torch.rand(4, WIDE)
    parts = to_sequential(model, (rows(length), condition))
    for other in (1, 4, 9):
        torch.testing.assert_close(parts((rows(other), condition)), model(rows(other), condition))


class Guided(Base):
    """In train mode a condition is dropped by chance, as for guidance without a classifier."""

    def given(self, x, other):
        if self.training and random.random() < 0.5:
            other = torch.zeros_like(other)
        return (other[:, None],)


def test_what_python_draws_before_the_blocks_counts_for_what_blocks_are_given():
    model, call = Guided(), (rows(), torch.rand(4, WIDE))
    parts = to_sequential(model, call)
    for training in (True, False):
        model.train(training)
        for seed in range(20):
            found = []
            for module in (lambda x: model(*x), parts):
                random.seed(seed)
                found.append(module(call))
            torch.testing.assert_close(*found)


# ------------------------------------------------------------------------------------------------------------ switches


class WithoutAutocast(Base):
    def forward(self, x, other=None):
        h = self.embed(x).float()
        with torch.autocast("cpu", enabled=False):
            for block in self.blocks:
                h = block(h)
        return self.head(h)


class Half(Base):
    def forward(self, x, other=None):
        h = self.embed(x)
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                h = block(h)
        return self.head(h.float())


class Frozen(Base):
    def forward(self, x, other=None):
        h = self.embed(x)
        with torch.no_grad():
            for block in self.blocks:
                h = block(h)
        return self.head(h)


@WAYS
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [WithoutAutocast, Half, Frozen])
def test_blocks_run_with_the_switches_that_the_model_sets_around_them(kind, autocast, cut):
    model, x, found, is_half = kind(), rows(), [], autocast or kind is Half
    parts = cut(model, x)
    for module in (model, parts):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = module(x)
        out.float().square().sum().backward()
        found.append([out, *[parameter.grad for parameter in model.parameters()]])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=5e-2 if is_half else 1e-4, atol=0.1 if is_half else 1e-5)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------------ refusals


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.block(x), x[:, 4:].mean() if is_long(x) else None


class Adds(Base):
    def __init__(self) -> None:
        super().__init__(Penalised)

    def forward(self, x, other=None):
        h, penalties = self.embed(x), []
        for block in self.blocks:
            h, penalty = block(h)
            penalties += [] if penalty is None else [penalty]
        return self.head(h) + sum(penalties)


class Shallower(Base):
    def forward(self, x, depth=3):
        h = self.embed(x)
        for block in self.blocks[:depth]:
            h = block(h)
        return self.head(h)


class Decides(Base):
    def forward(self, x, other=None):
        if self.head.weight.norm() > 10:
            x = x / 2
        return super().forward(x)


class Switched(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_buffer("is_on", torch.tensor(False))

    def forward(self, x, other=None):
        return super().forward(x / 2 if self.head.is_on else x)


@pytest.mark.parametrize("kind", [Decides, Switched])
def test_a_beginning_that_decides_by_what_lies_in_another_part_is_refused(kind):
    words = "what 'head' holds decides what is done before block 'embed'"
    with pytest.raises(PartitionError, match=words):
        to_sequential(kind(), rows())


class Entries(Base):
    def forward(self, x, other=None):
        entries = x if other is None else other
        h = super().forward(entries["x"]) * entries["factors"][0]["one"] - entries["factors"][0]["other"]
        return h if other is None else h + x


@WAYS
def test_the_entries_of_inputs_have_no_order(cut):
    factors = {"one": 2.0, "other": torch.rand(4, 1, 1)}
    entries, others = {"x": rows(), "factors": [factors]}, {"factors": [dict([*factors.items()][::-1])], "x": rows()}
    model = Entries()
    for sample, other in (((entries,), others), ((entries,), (others,)), ((rows(), entries), (rows(), others))):
        parts = cut(model, sample)
        torch.testing.assert_close(parts(other), model(*sample))
    parts = cut(model, {"x": rows(), "other": entries})
    torch.testing.assert_close(parts({"other": others, "x": rows()}), model(rows(), entries))


REFUSED = {
    "a leaf that was None": (Adds, rows(), rows(7), "block 'blocks.0' returned a tensor, and None on the sample"),
    "fewer blocks": (Shallower, (rows(), 3), (rows(), 2), "ended before it called block 'blocks.2'"),
    "no tensor": (Base, (rows(), rows()), (rows(), None), "tensor 1 of the inputs is None, and was a tensor on"),
}


@WAYS
@pytest.mark.parametrize("what", REFUSED)
def test_other_ways_are_refused_in_words(what, cut):
    kind, sample, other, words = REFUSED[what]
    parts = cut(kind(), sample)
    parts(sample)
    with pytest.raises(PartitionError, match=words):
        parts(other)


class Weighing(Block):
    """A block that returns its weights, too, of which there are twice as many as tokens."""

    def forward(self, x: Tensor, factor: Any = 1.0) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x, factor), torch.cat([x, x], 1).mean(2)


class CountsWeights(Base):
    """The end reads the numbers of the first block's weights, and the shapes of all."""

    def __init__(self) -> None:
        super().__init__(Weighing)

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        h, weights = self.embed(x), []
        for block in self.blocks:
            h, own = block(h)
            weights.append(own)
        per_row = weights[0].mean(1)[:, None, None]
        return self.head(h + per_row) / sum(own.shape[1] for own in weights)  # type: ignore[no-any-return]


class WithSpareBuffer(Base):
    """A module that is not called, with a buffer alone: a checkpoint has it."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Module()
        self.spare.register_buffer("steps", torch.arange(3.0))


@torch.no_grad()
@pytest.mark.parametrize("kind", (CountsWeights, WithSpareBuffer))
def test_shapes_of_what_blocks_return_and_buffers_that_no_one_reads_are_there(kind):
    model = kind()
    parts = to_sequential(model, rows(5), blocks="blocks")
    assert parts.state_dict().keys() == model.state_dict().keys()
    for x in (rows(5), rows(7)):
        torch.testing.assert_close(parts(x), model(x))
