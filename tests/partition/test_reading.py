"""Laws of what is read from JSON: it is what was written, and a value of another type is refused by its place."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from partition import PartitionError, Plan, Profile, plan, profile
from scheduler import Link

Path = tuple[str | int, ...]


def of_profile() -> tuple[Profile, Callable[[str], Profile]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    x, loss_fn = torch.rand(8, 4), nn.functional.mse_loss
    return profile(model, x, chunks=2, device="meta", optimizer=2, loss_fn=loss_fn, target=x), Profile.from_json


def of_plan() -> tuple[Plan, Callable[[str], Plan]]:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    link = {(0, 1): Link(1e-5, 1e9), (1, 0): 1e-6}
    return plan(model, torch.rand(8, 4), devices=["cpu", "cpu"], device="meta", flops=1e9, memory=[1e9, 1e8], link=link,
                schedules=["1f1b"]), Plan.from_json  # fmt: skip


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What stands in JSON, and where."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))
    if not items:
        yield path, value


def replaced(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    parts = dict(value) if isinstance(value, dict) else list(value)
    parts[path[0]] = replaced(parts[path[0]], path[1:], new)
    return parts


@pytest.mark.parametrize("make", [of_profile, of_plan])
def test_a_number_of_another_kind_is_refused_wherever_it_stands(make: Callable[[], tuple[Any, Any]]) -> None:
    """A plan with the balance "x", or a profile with -1 bytes, was read."""
    written, read = make()
    fields = json.loads(written.to_json())
    assert read(written.to_json()) == written
    tried = 0
    for path, value in leaves(fields):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        for wrong in ("a word", -1, float("nan"), True, [1]) if is_number else (3,) if isinstance(value, str) else ():
            with pytest.raises(PartitionError, match="this is no (profile|plan)"):
                read(json.dumps(replaced(fields, path, wrong)))
            tried += 1
    assert tried > 100


def test_the_place_of_what_is_wrong_is_named() -> None:
    written, read = of_profile()
    fields = json.loads(written.to_json())
    for path, wrong, words in (
        (("layers", 1, "saved"), ["4", []], r"layers\[1\].saved.own is '4', but must be a whole number"),
        (("layers", 0, "work"), [[1, 0]], r"layers\[0\].work is \[\[1, 0\]\], but must be a list of 4"),
        (("unit",), "minutes", "unit is 'minutes', but must be 's' or 'FLOP'"),
        (("rows",), 1.5, "rows is 1.5"), (("layers",), {}, "layers is {}, but must be a list"),
        (("speed",), 1, "there is no 'speed' in a Profile"), ((), [1], r"all of it is \[1\], but must be a list of 6"),
    ):  # fmt: skip
        with pytest.raises(PartitionError, match=words):
            read(json.dumps(replaced({"speed": None, **fields} if path == ("speed",) else fields, path, wrong)))
