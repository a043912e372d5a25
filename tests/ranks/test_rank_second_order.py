"""Law: derivatives of gradients over ranks, written by hand, are those of the plain module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest
from cover import some
from crew import Crew
from one_and_many import check_all
from second_order_reference import TWICE
from skip_models import SKIPS

HOW = ("product", "curved", "inputs", "weights", "summed")
SCHEDULES = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "interleaved": 2, "zb-v": 2}  # stages on a rank
CHECKPOINTS = ("always", "never", "mixed")
MODELS = ("mlp", "layer three times", "embedding and head")


def agree(crew: Crew, script: str, cases: Iterable[Mapping[str, Any]]) -> None:
    cases = list(cases)
    check_all(cases, crew.run("rank_second_order:compare", script, cases, timeout=300.0))


def on_schedules(size: int) -> list[dict[str, Any]]:
    """Cases with every schedule, every way to ask and every checkpoint mode."""
    per = {name: stages for name, stages in SCHEDULES.items() if size < 3 or stages == 1}
    return [
        {"schedule": schedule, "stages": size * per[schedule], "chunks": 3 if size == 3 else 4, "count": 9,
         "model": model, "checkpoint": checkpoint, "how": how}
        for schedule, model, checkpoint, how in product(per, ("mlp", "layered"), CHECKPOINTS, HOW)
    ]  # fmt: skip


def of_tied(size: int) -> list[dict[str, Any]]:
    return [
        {"model": model, "stages": size, "checkpoint": checkpoint, "how": how, "count": 7}
        for model, checkpoint, how in product(MODELS[1:], CHECKPOINTS, HOW)
    ]


def test_second_derivatives_are_those_of_the_plain_module_under_every_schedule(crew2: Crew, crew3: Crew) -> None:
    agree(crew2, "mixed", on_schedules(2)[::23])
    agree(crew3, "mixed", on_schedules(3)[::29])


def test_a_weight_that_ranks_have_in_common_counts_once(crew2: Crew, crew3: Crew) -> None:
    agree(crew2, "mixed", of_tied(2)[::7])
    agree(crew3, "mixed", of_tied(3)[1::13])
    agree(crew2, "mixed", [{"model": model, "stages": 2, "how": "once", "count": 7} for model in MODELS[1:]])


@pytest.mark.soak
@pytest.mark.parametrize("crew", [2, 3], indirect=True)
def test_second_derivatives_in_every_way(crew: Crew) -> None:
    agree(crew, "mixed", [*on_schedules(crew.size), *of_tied(crew.size), *of_all_models(crew.size)])


def test_forwards_are_repeated_to_the_bit_however_tensors_lie_in_memory(crew2: Crew) -> None:
    agree(crew2, "mixed", [
        {"model": "gaps", "stages": stages, "chunks": chunks, "checkpoint": checkpoint, "how": "curved",
         "count": 7, "live": live}
        for stages, chunks, checkpoint, live in some(product((2, 4, 9), (2, 3), CHECKPOINTS, (True, False)))
    ])  # fmt: skip


def test_an_input_without_a_gradient_has_no_part(crew2: Crew) -> None:
    agree(crew2, "mixed", [
        {"model": "mlp", "stages": 2, "checkpoint": checkpoint, "how": "curved", "count": 7, "live": False}
        for checkpoint in CHECKPOINTS[:2]
    ])  # fmt: skip


def of_all_models(ranks: int) -> list[dict[str, Any]]:
    """Skips, trees, captured leaves, frozen and empty stages, dropout, batch norms: what has a second derivative."""
    names = [name for name in (*TWICE, *SKIPS) if name != "checkpoint_reentrant"]
    return [
        {"model": name, "stages": ranks * (1 + number % 2), "checkpoint": CHECKPOINTS[number % 3], "how": how,
         "count": 7, "train": train}
        for (number, name), how, train in product(enumerate(names), ("curved", "inputs"), (True, False))
    ]  # fmt: skip


def test_every_model_with_a_second_derivative_has_it_over_two_ranks(crew2: Crew) -> None:
    agree(crew2, "mixed", of_all_models(2)[::11])


def test_gradients_in_grad_are_differentiated_too(crew2: Crew) -> None:
    agree(crew2, "accumulated", [{"model": model, "stages": 2, "count": 7} for model in MODELS])


def test_several_second_backwards_run_in_one_or_one_after_the_other(crew3: Crew) -> None:
    agree(crew3, "several", [
        {"model": model, "stages": 3, "checkpoint": checkpoint, "count": 7, "which": which}
        for model, checkpoint, which in some(product(
            ("mlp", "layer three times"), ("always", "never"), ("of one output", "one by one", "in one")
        ))
    ])  # fmt: skip


def test_maml_adapts_the_parameters_of_every_rank(crew2: Crew, crew3: Crew) -> None:
    for crew in (crew2, crew3):
        agree(crew, "adapted", [
            {"model": model, "stages": crew.size, "checkpoint": checkpoint, "count": 7, "steps": steps}
            for model, checkpoint, steps in (
                ("mlp", "always", 1), ("never_used", "never", 2), ("mlp", "mixed", 3)
            )[: 5 - crew.size]
        ])  # fmt: skip


def test_the_last_rank_alone_may_have_the_output(crew3: Crew) -> None:
    agree(crew3, "at_the_end", [
        {"model": model, "stages": 3, "checkpoint": checkpoint, "count": 7}
        for model, checkpoint in (("mlp", "always"), ("layered", "never"), ("layer three times", "mixed"))
    ])  # fmt: skip


def test_norms_and_inner_products_over_all_ranks_are_those_of_the_plain_module(crew2: Crew, crew3: Crew) -> None:
    agree(crew2, "normed", [{"model": model, "stages": 2, "count": 7} for model in MODELS])
    agree(crew3, "normed", [{"model": model, "stages": 3, "count": 7} for model in ("layer three times", "frozen")])


WORDS = {
    "third": "RuntimeError: a third derivative cannot go through a Pipe over ranks.*Leave it out of the second",
    "left out": "MismatchError: the calls differ.*second backward of.*All ranks make a second backward, or none does.*"
                "0 . grad.sum",
    "only one": "MismatchError: the options differ.*create_graph=True.*create_graph=False",
    "other order": "MismatchError: the calls differ between the ranks: rank 0: second backward of call.*second back",
    "plain instead": "MismatchError: the calls differ.*All ranks make a second backward, or none does",
    "x apart": "MismatchError: the second backward begins with other gradients.*Gradients of x are the same on all",
    "tied apart": "MismatchError: the second backward begins with other gradients at the gradient of the tied .*"
                  "'0.weight'.*counts once",
    "detached": "MismatchError: the options differ.*loss with a curvature",
    "batched": "RuntimeError: is_grads_batched=True.*Take one vector at a time",
    "freed": "RuntimeError: .*graph of its output was freed.*retain_graph=True",
    "freed at once": "RuntimeError: .*graph of its output was freed.*retain_graph=True",
    "parameters written": "CheckpointError: parameter '.*' .*was changed in place",
    "input written": "CheckpointError: the input of the pipe was changed in place",
    "grads written": "CheckpointError: a gradient of the pipe's output .* was changed in place",
}  # fmt: skip


def test_what_ranks_do_otherwise_is_an_error_on_all_and_the_next_call_is_right(crew2: Crew, crew3: Crew) -> None:
    kinds = list(WORDS)
    for crew, which in ((crew2, kinds), (crew3, kinds[1:3])):
        for rank, answers in enumerate(crew.run("rank_second_order:refused", which, timeout=120.0)):
            for how, (words, error) in zip(which, answers, strict=True):
                assert re.search(WORDS[how], words, re.DOTALL), f"{how}, rank {rank}: {words}"
                assert error <= 1e-10, f"{how}, rank {rank}: {error}"


def test_a_rank_that_no_gradient_reaches_takes_part_once_its_parameters_are_frozen(crew2: Crew) -> None:
    for words, _ in crew2.run("rank_second_order:unreached", False):
        assert "freeze the parameters of a rank whose gradients are all None" in words
    assert all(words == "" and error <= 1e-12 for words, error in crew2.run("rank_second_order:unreached", True))
