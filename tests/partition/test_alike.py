"""Layers that are alike count as one: the profile is that in which each is run, and what differs is run by itself."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_profiles import halved, models, wrapping
from torch import Tensor, nn

from partition import Profile, profile, to_sequential
from partition.profiles import working
from partition.profiles.alike import LikenessCache


class Numbered(nn.Module):
    """A block with a number, which it reads or does not."""

    def __init__(self, number: int, reads: str) -> None:
        super().__init__()
        self.number, self.reads, self.linear = number, reads, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        number = {
            "nothing": lambda: 0, "itself": lambda: self.number, "by vars": lambda: vars(self)["number"],
            "by dict": lambda: self.__dict__["number"], "by getattr": lambda: getattr(self, "number", 0),
        }[self.reads]()  # fmt: skip
        for _ in range(1 + number // 2):
            x = self.linear(x)
        return x


class Twice(nn.Module):
    """Two linear layers, or one that stands in two places; its output is its input as well."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = self.first if shares else nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        x, beside = x if isinstance(x, tuple) else (x, x)
        return self.second(self.first(x)), beside[:, :3].repeat(1, 2)


class Keeps(nn.Module):
    """A table of its own as an attribute, or the same as others'."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table, self.linear = table, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table


def of_blocks() -> dict[str, Callable[[], nn.Sequential]]:
    table = torch.rand(6)
    mixed = [nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Dropout(0.0), nn.Dropout(0.5), nn.Dropout(0.5).eval()]
    frozen = [nn.Linear(6, 6).requires_grad_(number % 3 > 0) for number in range(6)]
    tied = nn.Linear(6, 6)
    return {
        **{f"reads {reads}": lambda reads=reads: nn.Sequential(*[Numbered(number, reads) for number in range(6)])
           for reads in ("nothing", "itself", "by vars", "by dict", "by getattr")},
        "shared and not": lambda: nn.Sequential(*[Twice(number % 2 == 1) for number in range(4)]),
        "tables": lambda: nn.Sequential(*[Keeps(table) for _ in range(3)], *[Keeps(torch.rand(6)) for _ in range(3)]),
        "settings": lambda: nn.Sequential(*mixed, *mixed), "frozen": lambda: nn.Sequential(*frozen),
        "tied": lambda: nn.Sequential(tied, nn.ReLU(), tied, nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU()),
        "wrapping": lambda: nn.Sequential(*[wrapping(depth, depth > 1) for depth in (1, 1, 2, 2, 0, 1)]),
    }  # fmt: skip


def sequentials() -> Iterator[tuple[str, nn.Sequential, Any]]:
    for name, build in of_blocks().items():
        yield name, build(), torch.rand(4, 6)
    for name, (model, x) in models().items():
        yield name, nn.Sequential(*model, nn.Tanh(), nn.Tanh(), nn.Tanh()), x
    for name, (layers, x) in halved().items():
        yield f"halves of {name}", nn.Sequential(*layers), x


def without_memory(monkeypatch: pytest.MonkeyPatch, model: nn.Sequential, x: Any, **settings: Any) -> Profile:
    with monkeypatch.context() as patched:
        patched.setattr(LikenessCache, "run", lambda _, layer, copy, x, visit, reuse: visit())
        return profile(model, x, device="meta", **settings)


def ran(monkeypatch: pytest.MonkeyPatch, model: nn.Sequential, x: Any) -> int:
    """The number of layers that run to count FLOPs."""
    counts = [0]
    real = working.counted

    def counting(*given: Any) -> Any:
        counts[0] += 1
        return real(*given)

    with monkeypatch.context() as patched:
        patched.setattr("partition.profiles.profiling.counted", counting)
        profile(model, x, device="meta")
    return counts[0]


@pytest.mark.parametrize("name, model, x", [pytest.param(*case, id=case[0]) for case in sequentials()])
def test_the_profile_is_that_in_which_each_layer_runs(
    name: str, model: nn.Sequential, x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = [type(module) for module in model.modules()]
    assert profile(model, x, device="meta") == without_memory(monkeypatch, model, x)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("reads, count", [("nothing", 3), ("itself", 6), ("by vars", 6), ("by dict", 6)])
def test_what_differs_counts_where_it_is_read(reads: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has an input that needs no gradient; the third differs from the second, and is watched."""
    model = of_blocks()[f"reads {reads}"]()
    assert ran(monkeypatch, model, torch.rand(4, 6)) == count


def test_blocks_of_a_model_run_once_or_twice_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 20}
    sample = {"input_ids": torch.randint(20, (2, 5))}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6))
    layers = to_sequential(model, sample)
    assert ran(monkeypatch, layers, sample) == 4  # the beginning, two blocks, the end
    assert profile(layers, sample, device="meta") == without_memory(monkeypatch, layers, sample)
