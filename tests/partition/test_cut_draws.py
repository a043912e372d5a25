"""Law: what a model draws at random is the same in all its parts, in either mode, or the model is refused.

The models here add what they draw in one place and take it away in another, so what they return depends on no draw.
"""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from block_models import Chain, ids
from torch import nn
from torch.nn import functional

from partition import PartitionError, to_sequential
from partition.randomness import seed_host
from pipeline import Pipe

DRAWS = {
    "noise": torch.randn_like,
    "dropout": lambda x: functional.dropout(torch.ones_like(x), 0.5, training=True),
    "one for all rows": lambda x: torch.randperm(x.shape[1]).to(x).expand_as(x),
}
PLACES = ("before, for all blocks", "before, for one block", "before, for the end", "between blocks", "for each block",
          "in blocks", "behind")  # fmt: skip
TRAVELS = "what is drawn at random is used behind block '.*', in another part of the model, and does not travel there"


class Drawing(nn.Module):
    """A module that draws, in some modes."""

    def __init__(self, draw, modes):
        super().__init__()
        self.draw, self.modes = draw, modes

    def forward(self, x):
        return self.draw(x) if self.training in self.modes else torch.zeros_like(x)


class Scaled(nn.Module):
    """A block. It returns what it draws, if it does."""

    def __init__(self, drawing=None):
        super().__init__()
        self.weight, self.drawing = nn.Parameter(torch.ones((), dtype=torch.float64)), drawing

    def forward(self, x, noise=None):
        if self.drawing is None:
            return (x if noise is None else x + noise) * self.weight
        noise = self.drawing(x)
        return (x + noise) * self.weight, noise


class Cancelling(nn.Module):
    """It adds what it draws before, in or behind its blocks, and takes it away at the end."""

    def __init__(self, place, draw, modes, in_module):
        super().__init__()
        self.place, self.draw, self.modes = place, draw, modes
        self.embed, self.head = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)
        self.inner = Drawing(draw, modes) if in_module else None
        in_blocks = place == "in blocks"
        self.blocks = nn.ModuleList(Scaled(Drawing(draw, modes) if in_blocks else None) for _ in range(4))

    def drawing(self, x):
        if self.inner is not None:
            return self.inner(x)
        return self.draw(x) if self.training in self.modes else torch.zeros_like(x)

    def forward(self, x):
        hidden, place = self.embed(x), self.place
        early = self.drawing(hidden) if place.startswith("before") else 0
        drawn = early * {"before, for all blocks": 4, "behind": 0}.get(place, 1)
        hidden = hidden + early if place == "before, for the end" else hidden
        for number, block in enumerate(self.blocks):
            if place == "in blocks":
                hidden, noise = block(hidden)
                drawn = drawn + noise
            elif place == "before, for all blocks" or place == "before, for one block" and number == 2:
                hidden = block(hidden, early)
            elif place == "for each block" or place == "between blocks" and number == 2:
                noise = self.drawing(hidden)
                hidden, drawn = block(hidden + noise), drawn + noise
            else:
                hidden = block(hidden)
        if place == "behind":
            drawn = self.drawing(hidden)
            hidden = hidden + drawn
        return self.head(hidden - drawn)


@pytest.mark.parametrize("in_module", [True, False])
@pytest.mark.parametrize("modes", [(False,), (True,), (False, True)])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_drawn_is_the_same_in_all_parts(place, draw, modes, in_module):
    torch.manual_seed(0)
    model = Cancelling(place, DRAWS[draw], modes, in_module)
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = model.head(model.embed(x))
    is_lost = not in_module and (place.startswith("before") or place == "for each block")
    if is_lost:
        with pytest.raises(PartitionError, match=TRAVELS):
            to_sequential(model, x[:4])
        return
    layers = to_sequential(model, x[:4])
    for training in (False, True):
        layers.train(training)
        for checkpoint, schedule in (("never", "gpipe"), ("always", "1f1b")):
            pipe = Pipe(layers, [2, len(layers) - 2], 3, checkpoint=checkpoint, schedule=schedule)
            torch.testing.assert_close(pipe(x), expected, rtol=1e-12, atol=1e-12)


class Gate(nn.Module):
    """A block that draws, and asks for a number."""

    def __init__(self, modes):
        super().__init__()
        self.weight, self.modes = nn.Parameter(torch.rand(4)), modes

    def forward(self, x):
        noise = torch.rand_like(x) if self.training in self.modes else torch.ones_like(x)
        return x * self.weight * noise * (2 if bool(x.sum() > 0) else 1), noise


class Gated(nn.Module):
    """What its blocks return is added to what they are called with, so parts ask for the shapes of it."""

    def __init__(self, modes):
        super().__init__()
        self.blocks = nn.ModuleList(Gate(modes) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            gated, _ = block(x)
            x = x + gated
        return x


@pytest.mark.parametrize("modes", [(False,), (True,), (False, True)])
def test_finding_the_shapes_that_a_block_returns_draws_nothing(modes):
    torch.manual_seed(0)
    model, x = Gated(modes).double(), torch.randn(6, 4, dtype=torch.float64)
    layers = to_sequential(model, x[:4])
    for training in (False, True):
        model.train(training)
        outputs = []
        for run in (model, layers, layers):
            torch.manual_seed(6)
            outputs.append(run(x))
        assert all(torch.equal(output, outputs[0]) for output in outputs)


class Noisy(Chain):
    """It adds noise behind its blocks, in eval mode too."""

    def forward(self, x):
        out = super().forward(x)
        return out + torch.randn_like(out)


@pytest.mark.parametrize("training", [False, True])
def test_layers_draw_under_a_seed_what_the_model_draws_in_either_mode(training):
    model, x = Noisy().train(training), ids(4)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    layers = to_sequential(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    outputs = []
    for run in (model, layers):
        torch.manual_seed(6)
        outputs.append(run(x))
    assert torch.equal(*outputs)


class Shuffling(nn.Module):
    """It shuffles the columns of each row, in eval mode too, and returns how to put them back."""

    def forward(self, x):
        order = torch.rand_like(x).argsort(1)
        return x.gather(1, order), order.argsort(1)


class Shuffled(nn.Module):
    """Columns are shuffled before the blocks and put back behind them, as patches are that an autoencoder masks."""

    def __init__(self):
        super().__init__()
        self.embed, self.shuffling = nn.Linear(4, 4), Shuffling()
        self.blocks, self.head = nn.ModuleList(Scaled() for _ in range(3)), nn.Linear(4, 2)

    def forward(self, x):
        x, back = self.shuffling(self.embed(x))
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x.gather(1, back))


@pytest.mark.parametrize("training", [False, True])
def test_what_is_shuffled_before_the_blocks_is_put_back_behind_them(training):
    model, x = Shuffled().double().train(training), torch.randn(5, 4, dtype=torch.float64)
    layers = to_sequential(model, x[:3])
    torch.testing.assert_close(Pipe(layers, [2, len(layers) - 2], 2)(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_a_masked_autoencoder_of_transformers_is_masked_as_by_itself(training):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTMAEConfig(
        image_size=16, patch_size=4, **sizes, **{f"decoder_{key}": value for key, value in sizes.items()}
    )
    model = transformers.ViTMAEForPreTraining(config).double().train(training)
    x = {"pixel_values": torch.randn(4, 3, 16, 16, dtype=torch.float64)}

    def chosen(returned):
        return {"logits": returned.logits, "mask": returned.mask}

    layers = to_sequential(model, x, output=chosen)
    by_model, by_layers, by_pipe = [], [], []
    for run, outputs in ((lambda: chosen(model(**x)), by_model), (lambda: layers(x), by_layers)):
        torch.manual_seed(6)
        outputs.append(run())
    assert all(torch.equal(by_layers[0][key], value) for key, value in by_model[0].items())
    for balance in ([2, len(layers) - 2], [len(layers) - 2, 1, 1]):
        torch.manual_seed(6)
        by_pipe.append(Pipe(layers, balance, 2)(x))
    assert all(torch.equal(by_pipe[1][key], value) for key, value in by_pipe[0].items())
    assert by_pipe[0]["mask"].sum(1).tolist() == [12] * 4  # three quarters of 16 patches, in each row


def eighth(number):
    """A number of few bits: what is added and taken away leaves nothing."""
    return float(int(number * 8)) / 8


OF_SEED = {
    "a seed": lambda model: eighth(torch.initial_seed() % 8 / 8),
    "a state": lambda model: eighth(torch.rand((), generator=torch.Generator().set_state(torch.get_rng_state()))),
}
OF_PYTHON_OR_NUMPY = {
    "random": lambda model: eighth(random.random()),
    "randint": lambda model: float(random.randint(0, 7)),
    "numpy": lambda model: float(numpy.random.rand() < 0.1),
    "between": lambda model: float(0.3 < random.random() < 0.6),
    "either side": lambda model: eighth(abs(random.uniform(-1, 1))),
}
OF_OWN = {
    "torch's": lambda model: float(torch.rand((), generator=model.generator) < 0.1),
    "Python's": lambda model: float(model.of_python.random() < 0.1),
    "numpy's": lambda model: float(model.of_numpy.random() < 0.1),
    "numpy's old": lambda model: float(model.of_old_numpy.rand() < 0.1),
}
WAYS_TO_DRAW = {**OF_SEED, **OF_PYTHON_OR_NUMPY, **OF_OWN, "torch": lambda model: eighth(torch.rand(()).item())}


class Holder(nn.Module):
    """It holds generators, and may draw."""

    def __init__(self, draw=None):
        super().__init__()
        self.draw, self.generator, self.of_python = draw, torch.Generator().manual_seed(3), random.Random(3)
        self.of_numpy, self.of_old_numpy = numpy.random.default_rng(3), numpy.random.RandomState(3)

    def forward(self, x):
        return x.new_tensor([WAYS_TO_DRAW[self.draw](self)]).expand_as(x)

    def begin(self):
        """Put the generators where they were at first."""
        self.__init__(self.draw)


class Switched(Holder):
    """Where it is switched on, it adds what it draws before the blocks and takes it away behind them."""

    def __init__(self, draw, dropout=0.0, is_late=False):
        super().__init__(draw)
        self.is_on, self.is_late, self.dropout = [True], is_late, dropout
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.blocks = nn.ModuleList(nn.Sequential(Scaled(), nn.Dropout(dropout)) for _ in range(3))

    def forward(self, x):
        drawn = WAYS_TO_DRAW[self.draw](self) if self.is_on[0] else 0
        hidden = self.embed(x) + drawn
        for block in self.blocks:
            hidden = block(hidden)
        noise = torch.rand_like(hidden) if self.is_late else 0
        return self.head(hidden - drawn + noise - noise)


@pytest.mark.parametrize("draw", WAYS_TO_DRAW)
def test_what_the_model_draws_before_its_blocks_and_uses_behind_them_is_refused(draw):
    words = "keeps '(generator|of_.*)' from" if draw in OF_OWN else "drawn|draw|changes from call to call"
    with pytest.raises(PartitionError, match=words):
        to_sequential(Switched(draw).double(), torch.randn(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("draw", [*OF_PYTHON_OR_NUMPY, *OF_OWN, "torch"])
def test_what_the_model_draws_in_later_calls_alone_is_refused(draw, training, is_late):
    model, x = Switched(draw, 0.5, is_late).double().train(training), torch.randn(4, 4, dtype=torch.float64)
    model.is_on[0] = False
    layers = to_sequential(model, x)
    model.is_on[0] = True
    for balance in ([1] * len(layers), [len(layers) - 1, 1]):
        with pytest.raises(PartitionError, match="draws random numbers, which it did not on the sample"):
            Pipe(layers, balance, 2)(x)


class HoldingBlock(Scaled):
    def __init__(self, draw):
        super().__init__()
        self.holder = Holder(draw)

    def forward(self, x):
        return (x + self.holder(x)) * self.weight


@pytest.mark.parametrize("draw", [*OF_OWN, *OF_PYTHON_OR_NUMPY, "torch"])
@pytest.mark.parametrize("training", [False, True])
def test_blocks_draw_from_generators_that_they_hold_and_a_cut_draws_from_none(draw, training):
    model = nn.Sequential(nn.Linear(4, 4), *[HoldingBlock(draw) for _ in range(3)], nn.Linear(4, 2))
    model, x = Chained(model).double().train(training), torch.randn(6, 4, dtype=torch.float64)
    holders = [module for module in model.modules() if isinstance(module, Holder)]
    layers, outputs = to_sequential(model, x[:2]), []
    for run in (model, layers):
        seed_host(6)
        outputs.append(run(x))
        for holder in holders:
            holder.begin()
    assert torch.equal(*outputs)
    if draw in OF_OWN:
        expected = torch.cat([model(rows) for rows in x.tensor_split(3)])
        for checkpoint, schedule in (("never", "gpipe"), ("always", "1f1b")):
            for holder in holders:
                holder.begin()
            pipe = Pipe(layers, [2, len(layers) - 2], 3, checkpoint=checkpoint, schedule=schedule)
            assert torch.equal(pipe(x), expected)


class Chained(nn.Module):
    """It calls modules one after the other."""

    def __init__(self, modules):
        super().__init__()
        self.steps = nn.ModuleList(modules)

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x
