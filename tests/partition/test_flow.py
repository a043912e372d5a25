"""Laws: what a number depends on, the flow of the run says; so models that the sample tells little of are cut right."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from partition import PartitionError, to_sequential
from partition.models.flow import Flow

# Each computes from a list of values, and puts something there, or writes into one of them.
STEPS: dict[str, Callable[[list[Tensor], int, int], object]] = {
    "add": lambda values, i, j: values.append(values[i] + values[j]),
    "like": lambda values, i, j: values.append(torch.ones_like(values[i])),
    "new": lambda values, i, j: values.append(values[i].new_full((4,), 2.0)),
    "view": lambda values, i, j: values.append(values[i].flip(0).view(2, 2).t().reshape(4)),
    "alias": lambda values, i, j: values.append(values[i][:]),
    "add in place": lambda values, i, j: values[i].add_(values[j]),
    "write a part": lambda values, i, j: values[i][1:3].copy_(values[j][:2].clone()),
    "fill": lambda values, i, j: values[i].masked_fill_(values[j] > 0, 3.0),
    "out": lambda values, i, j: torch.mul(values[j], 2, out=values[i]),
    "where": lambda values, i, j: values.append(torch.where(values[i] > values[j], 1.0, 2.0)),
    "cat": lambda values, i, j: values.append(torch.cat([values[i][:2], values[j][2:]])),
    "item": lambda values, i, j: values.append(values[i] * values[j].sum().item()),
    "branch": lambda values, i, j: values.append(values[i] * 1 if values[j].sum() > 0 else values[i] + 1),
    "list": lambda values, i, j: values.append(torch.tensor([values[i].tolist()[0]] * 4)),
    "numpy": lambda values, i, j: values.append(torch.from_numpy(values[i].numpy().copy())),
    "dlpack": lambda values, i, j: values.append(torch.from_dlpack(values[i] * 2)),
    "chosen": lambda values, i, j: values.append(values[i] * len(values[j][values[j] > 0])),
    "choose": lambda values, i, j: values.append(values[i][values[j].argsort()]),
    "equal": lambda values, i, j: values.append(values[i] * torch.equal(values[j], values[j - 1])),
    "close": lambda values, i, j: values.append(values[i] * torch.allclose(values[j], values[j - 1])),
}


def computed(steps: list[tuple[str, int, int]], leaves: list[Tensor]) -> Tensor:
    values = [leaf.clone() for leaf in leaves]
    for step, i, j in steps:
        STEPS[step](values, i % len(values), j % len(values))
    return values[-1]


def roots_of(flow: Flow, node: int) -> set[int]:
    """The storages that a node was computed from, by what Python was told, too."""
    found, open_nodes, latest = set(), [node], -1
    while open_nodes:
        while open_nodes:
            number = open_nodes.pop()
            if number in found:
                continue
            found.add(number)
            latest = max(latest, flow.nodes[number].time)
            open_nodes += flow.nodes[number].parents
        open_nodes = [each for time, told in flow.host_reads if time < latest for each in told if each not in found]
    return {flow.roots[number] for number in found if number in flow.roots}


PROGRAMS = st.lists(st.tuples(st.sampled_from([*STEPS]), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8)


@given(PROGRAMS, st.integers(0, 10**6))
def test_what_changes_the_outcome_is_among_what_it_was_computed_from(steps, seed):
    check_roots(steps, seed)


@pytest.mark.parametrize("step", STEPS)
def test_it_is_for_each_operation(step):
    for i, j in ((0, 1), (2, 0), (1, 1)):
        for seed in range(5):
            check_roots([(step, i, j)], seed)


def check_roots(steps, seed):
    torch.manual_seed(seed)
    leaves = [torch.randn(4) for _ in range(3)]
    flow = Flow(leaves)
    with flow.watching():
        outcome = computed(steps, leaves)
    roots = roots_of(flow, flow.node(outcome))
    for leaf in leaves:
        if leaf.untyped_storage()._cdata not in roots:
            for scale in (-1.0, 0.0, 5.0):
                others = [torch.randn(4) * scale if each is leaf else each for each in leaves]
                assert torch.equal(computed(steps, others), outcome)


# Numbers to Python: all later depends on them.
TELLS = {"item", "branch", "list", "numpy", "dlpack", "chosen", "equal", "close"}


@pytest.mark.parametrize("step", sorted({*STEPS} - TELLS))
def test_what_only_a_shape_was_read_of_is_not_among_them(step):
    flow = Flow(leaves := [torch.randn(4) for _ in range(3)])
    with flow.watching():
        outcome = computed([(step, 0, 1)], leaves)
        for made in (torch.zeros_like(outcome), outcome.new_ones(3)):
            assert not roots_of(flow, flow.node(made))


# ---------------------------------------------------------- models of whose numbers the sample uses none, or few


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        told = self.tell(hidden)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            if number == 0:
                told = self.tell(hidden) if told is None else told
            if number == 2:
                hidden = self.use(hidden, told)
        return self.use(hidden, told)

    def tell(self, hidden: Tensor) -> object:
        return hidden > 3

    def use(self, hidden: Tensor, told: object) -> Tensor:
        return hidden.masked_fill(told, 1.0)


class Branch(Linears):
    def tell(self, hidden):
        return bool((hidden > 3).any())

    def use(self, hidden, told):
        return hidden * 2 if told else hidden


class Chooses(Branch):
    def tell(self, hidden):
        return (hidden > 3).nonzero().shape[0]


class Lists(Branch):
    def tell(self, hidden):
        return max(hidden.sum(-1).tolist()) > 3


class Exchanges(Linears):
    """The mask lies in memory that another library might have."""

    def tell(self, hidden):
        return torch.from_dlpack((hidden.detach() > 3).to(torch.uint8))

    def use(self, hidden, told):
        return hidden.masked_fill(told.bool(), 1.0)


class Rounded(Linears):
    def tell(self, hidden):
        return (hidden / 4).long()

    def use(self, hidden, told):
        return hidden + told


class Skips(Linears):
    """What is added is nothing on the sample."""

    def tell(self, hidden):
        return F.relu(hidden - 3)

    def use(self, hidden, told):
        return hidden + told


class Filled(nn.Linear):
    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        return super().forward(x).masked_fill(told, 1.0)


class MayFill(Filled):
    def forward(self, x: Tensor, told: Tensor | None) -> Tensor:
        return nn.Linear.forward(self, x) if told is None else super().forward(x, told)


class Called(nn.Module):
    """Blocks are called with a mask of what the beginning computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(Filled(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        told = hidden > 3
        for block in self.blocks:
            hidden = block(hidden, told)
        return hidden


class CalledOrNot(Called):
    """With a mask, or with None; every other block with None."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.every, self.blocks = every, nn.ModuleList(MayFill(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        told = hidden > 3
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, told if told.any() and number % self.every == 0 else None)
        return hidden


class EveryOther(CalledOrNot):
    def __init__(self) -> None:
        super().__init__(2)


class UsesMoreInEval(Linears):
    """What is read last in eval mode is read before in train mode."""

    def forward(self, x: Tensor) -> Tensor:
        kept = hidden = self.blocks[0](self.first(x))
        for number, block in enumerate(self.blocks[1:]):
            hidden = block(hidden)
            if number == 1 or number == 2 and not self.training:
                hidden = hidden + kept
        return hidden


@pytest.mark.parametrize("kind", [
    Linears, Branch, Chooses, Lists, Exchanges, Rounded, Skips, Called, CalledOrNot, EveryOther, UsesMoreInEval,
])  # fmt: skip
def test_numbers_that_the_sample_makes_no_use_of_are_right_later(kind):
    torch.manual_seed(0)
    model = kind().eval()
    layers = to_sequential(model, 0.1 * torch.randn(4, 4))
    torch.manual_seed(1)
    for scale in (0.1, 5.0, 50.0):
        x = scale * torch.randn(6, 4)
        assert torch.equal(layers(x), model(x))
    assert not torch.equal(model.use(x, model.tell(x)), x) if isinstance(model, Linears) else (model.first(x) > 3).any()


class Calls(nn.Linear):
    """It calls a module that it does not hold, and computes on."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__(4, 4)
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.others[0](x).relu() * 2
        return self.kept + 1


class Refers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.first = Calls(self.other)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.other(hidden).masked_fill(self.first.kept > 1, 1.0)


def test_what_a_module_computes_behind_another_that_it_calls_is_its_own():
    model = Refers().eval()
    with pytest.raises(PartitionError, match="what 'first' computes is used behind block 'blocks.3'"):
        to_sequential(model, torch.zeros(4, 4), blocks="blocks")


class ReadsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        return hidden @ self.blocks[0].weight


def test_a_parameter_of_a_block_that_the_end_reads_is_refused_with_the_name_of_the_block():
    with pytest.raises(PartitionError, match="what 'blocks.0' holds is used behind block 'blocks.3'"):
        to_sequential(ReadsBlock(), torch.zeros(4, 4), blocks="blocks")


class TiedBranch(nn.Module):
    """Python is told between two blocks what a module computes that the end has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.both(x)
        is_large = bool((hidden > 3).any())
        for block in self.blocks:
            hidden = block(-hidden if is_large else hidden)
        return self.both(hidden)


def test_a_way_that_a_part_cannot_find_is_refused():
    with pytest.raises(PartitionError, match="what 'both' computes is used behind block 'blocks.0'"):
        to_sequential(TiedBranch().eval(), torch.zeros(4, 4), blocks="blocks")


class NormTwice(nn.Module):
    def __init__(self, **settings: bool) -> None:
        super().__init__()
        self.norm, self.blocks = nn.BatchNorm1d(4, **settings), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for number, block in enumerate(self.blocks):
            x = block(self.norm(x) if number == 2 else x)
        return x


@pytest.mark.parametrize("settings", [{}, {"affine": False}], ids=str)
def test_statistics_that_several_parts_would_write_are_refused(settings):
    with pytest.raises(PartitionError, match="module 'norm' is called in several parts .* call it once, with a tensor"):
        to_sequential(NormTwice(**settings), torch.randn(4, 4), blocks="blocks")
    model = NormTwice(track_running_stats=False, **settings)
    assert len(to_sequential(model, torch.randn(4, 4), blocks="blocks")) == 7


def test_the_sample_decides_nothing_but_the_way():
    """Cut with one sample or another, a model has the same parts."""
    model = copy.deepcopy(Linears().eval())
    for scale in (0.1, 50.0):
        passing = to_sequential(model, scale * torch.randn(4, 4))[0].outline.passing
        assert passing == to_sequential(model, torch.zeros(4, 4))[0].outline.passing
