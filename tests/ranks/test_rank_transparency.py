"""Law 1 over ranks: a call gives the bits of one process, and those of the plain module, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
from cover import pairwise
from crew import Crew
from law_check import AXES
from law_models import MODELS
from one_and_many import Compared, apportioned, check_all, differences, in_one_process
from rank_transparency import ROWS, STAGES, one_call, plainly, runnable
from skip_models import SKIPS
from torch import Tensor

from scheduler import names

CAPTURED = "captured"  # has a test of its own
COVER = {
    "schedule": names(),
    "model": tuple(name for name in MODELS if name != CAPTURED),
    "stages": tuple(STAGES),
    "rows": tuple(ROWS),
    "chunks": (1, 2, 4, 5),
    **{axis: AXES[axis] for axis in ("checkpoint", "train", "entry", "input_grad")},
}
PLAIN = {"chunks": 4, "train": True, "entry": "step mean", "input_grad": False}


def all_agree(crews: Iterable[Crew], configs_of: Callable[[int], Iterable[dict[str, Any]]]) -> None:
    for crew, configs in apportioned(crews, configs_of):
        configs = [runnable(config, crew.size) for config in configs]
        check_all(configs, crew.run("rank_transparency:compare_all", configs, timeout=300.0))


def test_ranks_give_the_bits_of_one_process_and_of_the_plain_module(crew2: Crew, crew3: Crew, crew4: Crew) -> None:
    configs = pairwise(COVER)
    all_agree((crew2, crew3, crew4), lambda size: configs if size == 2 else configs[size - 3 :: 2])


def test_what_goes_past_ranks_arrives_with_its_gradient(crew2: Crew, crew3: Crew, crew4: Crew) -> None:
    """Skips over one, two and three ranks: tensors, containers, plain values, weights, buffers."""
    configs = pairwise({**COVER, "model": tuple(SKIPS)})
    all_agree((crew2, crew3, crew4), lambda size: configs[size - 2 :: 3])


def test_every_schedule_gives_these_bits_in_every_checkpoint_mode_for_any_number_of_rows(crew2: Crew) -> None:
    """With BatchNorm and dropout, and two stages a rank."""
    words = product(names(), ("always", "except_last", "never"), ROWS)
    kept = {**PLAIN, "model": "convnet", "stages": "two"}
    all_agree([crew2], lambda size: [
        {**kept, "schedule": name, "checkpoint": mode, "rows": rows} for name, mode, rows in words
    ])  # fmt: skip


@pytest.mark.parametrize("entry", AXES["entry"])
def test_a_parameter_that_its_stage_holds_in_a_list_has_its_gradient_on_its_rank(crew2: Crew, entry: str) -> None:
    kept = {**PLAIN, "model": CAPTURED, "stages": "one", "schedule": "1f1b", "checkpoint": "always", "rows": "even"}
    all_agree([crew2], lambda size: [{**kept, "entry": entry}])


def test_the_comparison_sees_another_seed_another_bit_and_what_no_rank_knows() -> None:
    """The harness: what it may not let pass."""
    words = {"model": "mlp", "stages": "one", "schedule": "1f1b", "checkpoint": "always", "rows": "even"}
    config = runnable({**PLAIN, **words}, 2)
    right = plainly(config)
    for name, value in right.items():
        if isinstance(value, Tensor):
            wrong = {**right, name: value * (1 + 2**-52)}
            assert [words.startswith(name) for words in differences(wrong, right)] == [True]
    assert differences({**right, "more": None}, right) == ["more is known here alone"]
    some = {name: value for name, value in right.items() if name != "gradient of 0.weight"}
    with pytest.raises(AssertionError, match="no rank knows .'gradient of 0.weight'"):
        check_all(["a case"], [[Compared([], list(some), list(right))]] * 2)
    first = one_call(in_one_process, config)
    assert not differences(first, right)
    config["chunks"] = 3
    assert differences(one_call(in_one_process, config), right)
