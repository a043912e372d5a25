"""Law: entries of containers are read and written as Python's own classes do, whatever a subclass makes of them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partition.containers import CONTAINERS, FIXED, base_of, length, reader_of, shorten, write
from pipeline import Pipe
from pipeline.curvature import Hessian


def hostile(base: type) -> type:
    """A subclass whose own methods nobody may call."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a method of the subclass was called")

    own = {name for name in vars(base) if callable(getattr(base, name))} - {"__new__", "__init__", "__getattribute__"}
    return type(f"Hostile{base.__name__}", (base,), dict.fromkeys(own, refuse))


HOSTILE = {base: hostile(base) for base in (*CONTAINERS, *FIXED)}
entries = st.lists(st.integers(0, 255), max_size=6)


def made(base: Any, kind: Any, values: list[int]) -> Any:
    """A container of this kind, and what it holds as its base shows it."""
    holder = kind()
    if issubclass(base, dict):
        for value in values:
            base.__setitem__(holder, value, str(value))
    elif base is set:
        set.update(holder, values)
    else:
        base.extend(holder, values)
    return holder


def shown(base: Any, holder: Any) -> Any:
    found = [*base.__iter__(holder)]
    return [*zip(found, base.values(holder), strict=True)] if issubclass(base, dict) else found


@settings(max_examples=examples(40))
@given(entries, entries, st.booleans(), st.integers(0, 6), st.sampled_from(CONTAINERS))
def test_a_container_gets_back_what_was_read_whatever_was_done_with_it_since(
    values: list[int], others: list[int], is_hostile: bool, most: int, base: Any
) -> None:
    kind = HOSTILE[base] if is_hostile else base
    holder, other = made(base, kind, values), made(base, kind, others)
    expected = shown(base, holder)
    read = reader_of(kind)(holder)
    assert length(holder) == len(expected)
    write(holder, reader_of(kind)(other))
    assert sorted(shown(base, holder)) == sorted(shown(base, other))
    assert base is set or shown(base, holder) == shown(base, other)
    write(holder, read)
    assert sorted(shown(base, holder)) == sorted(expected)
    assert base is set or shown(base, holder) == expected
    shorten(holder, most)
    assert len(shown(base, holder)) == (len(expected) if base is set else min(most, len(expected)))
    assert base is set or shown(base, holder) == expected[:most]


def test_an_order_is_a_content() -> None:
    ordered: OrderedDict[str, int] = OrderedDict(a=1, b=2, c=3)
    ordered.move_to_end("a")
    read = reader_of(OrderedDict)(ordered)
    assert read == ["b", "c", "a", 2, 3, 1]
    ordered.move_to_end("b")
    del ordered["c"]
    write(ordered, read)
    assert [*ordered.items()] == [("b", 2), ("c", 3), ("a", 1)]


@pytest.mark.parametrize("make, base", [
    (lambda: Counter("aab"), dict), (lambda: defaultdict(list, a=[1]), dict), (lambda: deque([1, 2], 2), deque),
])  # fmt: skip
def test_what_else_a_container_knows_stays(make: Callable[[], Any], base: type) -> None:
    holder, again = make(), make()
    assert base_of(type(holder)) is base
    read = reader_of(type(holder))(holder)
    holder.clear()
    write(holder, read)
    assert holder == again
    assert getattr(holder, "default_factory", None) is getattr(again, "default_factory", None)
    assert getattr(holder, "maxlen", None) == getattr(again, "maxlen", None)


def test_nothing_is_written_where_nothing_has_changed() -> None:
    """A set that somebody is walking through may be written to with what it holds."""
    walked = {1, 2, 3}
    found = [write(walked, [*walked]) for _ in walked]
    assert found == [None] * 3


@given(entries, st.sampled_from(FIXED))
def test_what_is_fixed_is_read_alone(values: list[int], base: Any) -> None:
    holder = base.__new__(HOSTILE[base], values)
    assert (reader_of(HOSTILE[base])(holder), length(holder)) == (list(base(values)), len(base(values)))


class Irreps(nn.Module):
    """A layer that keeps what says of itself that it has no length, as those of e3nn do."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(3, 3), {"irreps": [base.__new__(HOSTILE[base], [1, 2])]}

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


@pytest.mark.parametrize("base", FIXED)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_layers_and_losses_may_have_what_cannot_be_iterated(base: Any, checkpoint: str) -> None:
    model, irreps = nn.Sequential(*[Irreps(base) for _ in range(3)]).double(), base.__new__(HOSTILE[base], [3])
    pipe, x = Pipe(model, [1, 2], 2, checkpoint=checkpoint), torch.randn(4, 3, dtype=torch.float64)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() + 0 * id(irreps)

    for _ in range(3):
        pipe.zero_grad()
        pipe.step(x, x, loss_fn=loss_fn)
    expected = torch.autograd.grad(loss_fn(model(x), x), list(model.parameters()))
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(expected))
    assert Hessian(pipe, (x, x), loss_fn).check().ok
