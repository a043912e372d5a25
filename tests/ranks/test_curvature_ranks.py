"""Law: products and estimates over ranks are those of one process; what goes wrong on one rank all are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cover import either, some
from crew import Crew
from one_and_many import apportioned, check_all
from rank_models import CASES

SCHEDULES = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "interleaved": 2, "zb-v": 2}  # stages on a rank


def agree(crews: Iterable[Crew], script: str, cases_of: Callable[[int], Iterable[dict[str, Any]]]) -> None:
    """The bits of one process; the cases for so many ranks are apportioned among the crews."""
    for crew, cases in apportioned(crews, cases_of):
        check_all(cases, crew.run("rank_curvature:compare_all", script, cases))


def agree_nearly(crew: Crew, script: str, cases: Sequence[tuple[Any, ...]]) -> None:
    """The numbers of one process, but for the order of sums; and on all ranks the same, to the bit."""
    found = crew.run("rank_curvature:compare_near", script, cases)
    check_all(cases, [[compared for compared, _ in results] for results in found])
    for case, *ranks in zip(cases, *found, strict=True):
        numbers = [bits for _, bits in ranks]
        assert numbers[0] and all(each == numbers[0] for each in numbers), f"{case}: {numbers}"


# --------------------------------------------------------------------------------------------------------- products


HOW: list[dict[str, Any]] = [
    {"model": "layered", "matrix": "H", "checkpoint": "always", "loss": "counted", "counts": (9, 5)},
    {"model": "layered", "matrix": "G", "checkpoint": "never"},
    {"model": "dropping", "matrix": "F", "checkpoint": "mixed", "loss": "square", "counts": (5,)},
    {"model": "dropping", "matrix": "H", "checkpoint": "mixed", "training": True},
]
ON_MANY = {
    2: (SCHEDULES, either(HOW[::2], HOW)),
    3: (("1f1b", "gpipe"), HOW[::2]),
    4: (("zb-v", "interleaved", "zb-h1"), HOW[3:]),
}


def test_products_are_those_of_one_process_and_of_the_matrix_under_every_schedule(
    crew2: Crew, crew3: Crew, crew4: Crew
) -> None:
    def cases_of(size: int) -> Iterator[dict[str, Any]]:
        for schedule, how in product(*ON_MANY[size]):
            stages = SCHEDULES[schedule] * size
            yield {"schedule": schedule, "stages": stages, "chunks": 6 if stages % 3 == 0 else 4, **how}

    agree((crew2, crew3, crew4), "multiplied", cases_of)


def test_a_weight_that_ranks_have_in_common_is_one_parameter(crew2: Crew, crew3: Crew, crew4: Crew) -> None:
    models = {2: ["ends"], 3: ["many", "middle"], 4: ["many"]}
    agree((crew2, crew3, crew4), "multiplied", lambda size: [
        {"model": model, "stages": size, "matrix": matrix, "chunks": 3, "schedule": "1f1b"}
        for model, matrix in product(models[size], "HGF" if size < 4 else "H")
    ])  # fmt: skip


def test_a_weight_that_stages_of_one_rank_have_in_common_is_one_parameter(crew2: Crew) -> None:
    agree([crew2], "multiplied", lambda size: [
        {"model": model, "stages": 2 * size, "matrix": "H", "chunks": 4, "schedule": schedule}
        for schedule, model in (("zb-v", "ends"), ("zb-v", "middle"), ("interleaved", "many"))
    ])  # fmt: skip


def test_ranks_without_parameters_or_without_chosen_ones_take_part(crew2: Crew, crew3: Crew) -> None:
    agree((crew2, crew3), "multiplied", lambda size: [
        {"model": model, "stages": size, "matrix": matrix, "params": params, "chunks": 2, "counts": (4, 6)}
        for model, matrix, params in (("first bare", "H", None), ("last bare", "G", None), ("frozen", "H", None),
                                      ("layered", "H", "0"))
    ])  # fmt: skip


def test_a_tied_weight_is_chosen_on_all_ranks_by_any_of_its_names(crew2: Crew, crew3: Crew) -> None:
    cases = [("ends", "0.weight"), ("ends", "3"), ("many", ("1", "2.bias")), ("ends", _weights)]
    agree((crew2, crew3), "multiplied", lambda size: [
        {"model": model, "stages": size, "matrix": "H", "params": params, "chunks": 2, "counts": (4,)}
        for model, params in (cases if size == 2 else cases[:2])
    ])  # fmt: skip


def test_names_of_parameters_may_come_in_another_order_on_each_rank(crew2: Crew) -> None:
    agree([crew2], "in_any_order", lambda size: [{}])


def _weights(name: str, parameter: Any) -> bool:
    """A predicate; it knows the tied weight by its first name alone."""
    return name in ("0.weight", "1.weight")


def test_skips_trees_and_captured_weights_cross_the_ranks_with_their_tangents(crew2: Crew, crew3: Crew) -> None:
    names = {2: ("relay", "exchange", "mlp", "only_by_the_skip"),
             3: ("many_readers", "containers", "transformer", "stashed_weight")}  # fmt: skip
    agree((crew2, crew3), "of_case", lambda size: [
        {"name": name, "stages": size, "matrix": matrix, "training": training, "checkpoint": checkpoint}
        for name, matrix, checkpoint in zip(names[size], "HGHH", ("mixed", "never", "always", "mixed"), strict=True)
        for training in (False, True)
    ])  # fmt: skip


def of_all_models(ranks: int, turn: int) -> list[dict[str, Any]]:
    """Every model that has a second derivative, with matrices and checkpoint modes in turns."""
    names = [name for name in CASES if name != "checkpoint_reentrant"]  # which is refused
    modes = ("always", "never", "mixed")
    return [
        {"name": name, "stages": ranks, "matrix": "HGHF"[(number + turn) % 4], "training": False,
         "checkpoint": modes[(number + turn) % 3]}
        for number, name in enumerate(names)
    ]  # fmt: skip


@pytest.mark.soak
def test_products_of_every_model_over_two_ranks_are_those_of_one_process(crew2: Crew) -> None:
    cases = of_all_models(2, 0)
    check_all(cases, crew2.run("rank_curvature:compare_close", "of_case", cases))


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(4))
def test_products_of_every_model_over_more_ranks_are_those_of_one_process(
    crew2: Crew, crew3: Crew, crew4: Crew, turn: int
) -> None:
    for crew in (crew2, crew3, crew4):
        cases = of_all_models(crew.size, turn)
        check_all(cases, crew.run("rank_curvature:compare_close", "of_case", cases))


# --------------------------------------------------------------------------------------------------------- estimates


def test_random_vectors_and_inner_products_are_those_of_one_process(crew2: Crew, crew3: Crew, crew4: Crew) -> None:
    for crew in (crew2, crew3, crew4):
        agree_nearly(crew, "drawn_by_the_space", [(model, crew.size) for model in ("layered", "many", "first bare")])


ESTIMATES = (
    "hutchinson", "hutch++", "eigenpairs", "density", "solve", "diagonal", "layer traces", "per layer", "check",
)  # fmt: skip


def test_estimators_give_one_process_s_numbers_on_all_ranks(crew2: Crew, crew3: Crew) -> None:
    models = {2: "ends", 3: "first bare"}
    for crew, cases in apportioned((crew2, crew3), lambda size: product([models[size]], [size], ESTIMATES)):
        agree_nearly(crew, "estimated", cases)


@pytest.mark.parametrize("model", ["ends", "last bare"])
def test_a_lanczos_run_that_ends_early_or_fails_on_one_rank_goes_on_to_the_bit(
    crew2: Crew, crew3: Crew, tmp_path: Path, model: str
) -> None:
    crew = crew2 if model == "ends" else crew3
    for found in crew.run("rank_curvature:resumed", str(tmp_path), model):
        converged, files, steps, failed, refused, same, left = found
        assert not converged and same and not left, found
        assert files == [f"run.rank{each}of{crew.size}.pt" for each in range(crew.size)]
        assert steps[0] < steps[1]  # what was multiplied before the failure is kept, on all ranks
        assert failed[:2] == ("KeyError", "'no such loss'") and failed[3] < 10
        assert refused[0] == "ResumeError" and refused[3] < 10, refused


# --------------------------------------------------------------------------------------------------------- failures

BROKEN = [
    ("forward", 0, "H", "ValueError", "F0"), ("backward", 1, "H", "ZeroDivisionError", "F0"),
    ("backward", 4, "H", "ZeroDivisionError", "B0"), ("backward", 5, "G", "ZeroDivisionError", "B1"),
    ("loss", 2, "F", "KeyError", "B1"),
]  # fmt: skip


def test_what_a_rank_raises_in_a_product_is_raised_on_all_and_the_next_product_is_right(
    crew2: Crew, crew3: Crew
) -> None:
    def cases_of(size: int) -> Iterator[tuple[Any, ...]]:
        for (what, countdown, matrix, kind, action), where in product(BROKEN, range(size)):
            if (what == "loss") <= (where == size - 1):
                action = "B" + action[1:] if where == size - 1 else action
                yield where, what, countdown, matrix, kind, f"{where}{action}"

    for crew, cases in apportioned((crew2, crew3), cases_of):
        last = crew.size - 1
        for results in crew.run("rank_curvature:broken", [case[:4] for case in cases], timeout=180.0):
            for case, ((kind, words, notes, seconds), is_right) in zip(cases, results, strict=True):
                assert (kind, seconds < 10, is_right) == (case[4], True, True), (case, kind, words, notes)
                if case[0] != last:
                    assert case[5] in " ".join(notes), (case, notes)


APART = {  # what is done -> what the error says
    "values": "the options differ between the ranks: rank 0: its values=",
    "rows": "differ between the ranks",
    "mini-batches": "none after 2",
    "chunks": "chunks 2",
    "matrix": "matrix=Gauss-Newton",
    "training": "training=True",
    "params": "params differ between the ranks",
    "reduction": "loss_reduction=sum",
    "vectors": "differ between the ranks",
    "blocks": "differ between the ranks",
    "dots": "take none of them into an `if rank == 0:`",
    "step": "the calls differ between the ranks",
    "gradient": "differ between the ranks",
    "seeds": "seed differ between the ranks: rank 0: ",
    "damping": "damping differ between the ranks: rank 0: ",
    "a part": "are missing. Give zeros for those that you leave out",
    "changed": "mini-batch 0 of the data is not what it was in the first product",
    "frozen": "do not require a gradient. Call requires_grad_() first",
}
LOCAL = {"a part": "KeyError", "changed": "ValueError", "frozen": "ValueError"}  # found on one rank alone


def test_ranks_that_do_not_do_the_same_are_told_before_a_number_is_wrong(crew2: Crew) -> None:
    cases = some(product(APART, (0, 1)))
    for (which, _), *ranks in zip(cases, *crew2.run("rank_curvature:apart", cases), strict=True):
        words = APART[which]
        for (kind, said, _, seconds), is_right in ranks:
            expected = LOCAL.get(which, "MismatchError"), True, True
            assert (kind, seconds < 10, is_right) == expected, (which, kind, said)
        assert any(words in said + " ".join(notes) for (_, said, notes, _), _ in ranks), (which, ranks)


def test_a_product_on_one_rank_alone_ends_when_the_others_stay_away_for_longer_than_the_timeout(crew2: Crew) -> None:
    (kind, words, _, seconds), _ = crew2.run("rank_curvature:absent")
    assert kind == "RankError" and "rank 1 did not enter curvature" in words and 1 < seconds < 10


def test_unequal_entries_for_one_tied_parameter_are_refused_on_all_ranks(crew2: Crew, crew3: Crew) -> None:
    for crew, model, ranks in ((crew2, "ends", "[0, 1]"), (crew3, "many", "[0, 2]")):
        for found, is_right in crew.run("rank_curvature:unequal_ties", model):
            for kind, words, _, seconds in found:
                assert kind == "MismatchError" and seconds < 10
                assert "the entries for the tied parameter '0.weight' = " in words
                assert f"differ between ranks {ranks}: it is one parameter. Give the same" in words
            assert is_right


def test_a_flat_vector_is_refused_over_ranks(crew2: Crew) -> None:
    for found in crew2.run("rank_curvature:flat"):
        for kind, words, *_ in found:
            assert kind == "ValueError"
            assert "over ranks a vector is a dict of this rank's parameters by name: no rank has the whole" in words


def test_a_plain_module_is_each_rank_s_own(crew2: Crew) -> None:
    (one, its), (other, others) = crew2.run("rank_curvature:own_module")
    assert one == pytest.approx(its, rel=1e-12) and other == pytest.approx(others, rel=1e-12) and one != other


def test_an_operator_without_a_seed_draws_one_on_all_ranks_and_takes_that_of_rank_0(crew2: Crew, crew3: Crew) -> None:
    for crew in (crew2, crew3):
        (numbers, seed), *others = crew.run("rank_curvature:generators")
        assert all(each == (numbers, seed) for each in others)
