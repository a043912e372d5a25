"""Laws of runs that are interrupted: they go on to the same bits, on one process and over several, or say why not."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from cover import either
from dense_map import DenseMap, DenseSpace, symmetric
from dense_ranks import RankMap, over_ranks
from torch import Tensor

from pipeline.curvature.estimates.density import density
from pipeline.curvature.estimates.diagonal import diagonal
from pipeline.curvature.estimates.eigenpairs import Eigenpairs, top_eigenpairs
from pipeline.curvature.estimates.frobenius import frobenius_squared
from pipeline.curvature.estimates.krylov import Basis
from pipeline.curvature.estimates.layer_traces import layer_traces
from pipeline.curvature.estimates.resume import ResumeError, RunFiles
from pipeline.curvature.estimates.ritz import RitzPairs, ritz
from pipeline.curvature.estimates.solve import solve
from pipeline.curvature.estimates.trace import trace
from pipeline.curvature.linear import LinearMap
from pipeline.curvature.results.result import Result
from pipeline.curvature.space import Vec
from pipeline.distributed.agreement import MismatchError

# Two rounds that find something, a third that does not, and restarts on the way.
VALUES = torch.tensor([6.0, 6.0, 6.0, 5.0] + [0.1 * place for place in range(26)])
WANTED: dict[str, Any] = {"k": 3, "tol": 1e-9, "block": 2, "max_basis": 18}


class Interrupted(DenseMap):
    """Ends with an error in place of its n-th call of `products`, as often as n's are given."""

    def __init__(self, matrix: Tensor, at: Sequence[int], block: int = 4) -> None:
        super().__init__(matrix, block)
        self.calls, self.at = 0, at

    def products(self, vectors: Sequence[Vec]) -> list[Vec]:
        self.calls += 1
        if self.calls in self.at:
            raise KeyboardInterrupt
        return super().products(vectors)


def assert_equal(one: Eigenpairs, other: Eigenpairs) -> None:
    assert torch.equal(one.values, other.values) and torch.equal(one.residuals, other.residuals)
    assert (one.products, one.converged) == (other.products, other.converged)
    assert (one.scale, one.why) == (other.scale, other.why)
    for left, right in zip(one.vectors, other.vectors, strict=True):
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def calls_of_a_whole_run() -> int:
    A = Interrupted(symmetric(VALUES), [])
    top_eigenpairs(A, **WANTED)
    return A.calls


def test_interrupted_at_any_product_and_called_again_a_run_gives_the_same_bits(tmp_path: Path) -> None:
    matrix, path = symmetric(VALUES), tmp_path / "top.pt"
    straight = top_eigenpairs(DenseMap(matrix), **WANTED)
    assert straight.converged and straight.values.tolist() == pytest.approx([6.0, 6.0, 6.0])
    calls = calls_of_a_whole_run()
    assert calls > 20
    for at in range(1, calls + 1, either(4, 1)):
        with pytest.raises(KeyboardInterrupt) as caught:
            top_eigenpairs(Interrupted(matrix, [at]), resume=path, **WANTED)
        assert "products is in" in caught.value.__notes__[0]
        rest = Interrupted(matrix, [])
        assert_equal(top_eigenpairs(rest, resume=path, **WANTED), straight)
        assert rest.calls == calls - at + 1  # nothing is done twice
        assert not list(tmp_path.iterdir())  # a run that is done leaves no file


def test_interrupted_at_every_product_in_turn_a_run_gives_the_same_bits(tmp_path: Path) -> None:
    matrix, path, times = symmetric(VALUES), tmp_path / "top.pt", 0
    while True:
        try:
            found = top_eigenpairs(Interrupted(matrix, [2]), resume=path, **WANTED)
            break
        except KeyboardInterrupt:
            times += 1
    # two calls measure the residuals, and are made again after the last interruption
    assert times == calls_of_a_whole_run() - 1
    assert_equal(found, top_eigenpairs(DenseMap(matrix), **WANTED))


@pytest.mark.parametrize("method", ["append", "subtract_", "local_inside", "cut"])
def test_interrupted_between_products_a_run_gives_the_same_bits(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, path, real, left = symmetric(VALUES), tmp_path / "top.pt", getattr(Basis, method), 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        result = real(*arguments)
        if left == 0:
            raise KeyboardInterrupt
        return result

    straight = top_eigenpairs(DenseMap(matrix), **WANTED)
    monkeypatch.setattr(Basis, method, interrupted)
    for at in either([1, 2, 9, 40, 120], [*range(1, 12), 40, 77, 120]):
        left = at
        try:
            top_eigenpairs(DenseMap(matrix), resume=path, save_every=0, **WANTED)
        except KeyboardInterrupt:
            pass
        left = 0
        assert_equal(top_eigenpairs(DenseMap(matrix), resume=path, **WANTED), straight)


def test_interrupted_between_products_and_what_is_made_of_them_a_run_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, path, left = symmetric(VALUES), tmp_path / "top.pt", 0

    def interrupted(projection: Tensor) -> RitzPairs:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return ritz(projection)

    straight = top_eigenpairs(DenseMap(matrix), **WANTED)
    monkeypatch.setattr("pipeline.curvature.estimates.lanczos.ritz", interrupted)
    for at in range(2, 16):
        left = at
        with pytest.raises(KeyboardInterrupt):
            top_eigenpairs(DenseMap(matrix), resume=path, save_every=0, **WANTED)
        left = 0
        assert_equal(top_eigenpairs(DenseMap(matrix), resume=path, **WANTED), straight)


def test_rows_that_are_being_overwritten_are_not_saved_over_a_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, path = symmetric(VALUES), tmp_path / "top.pt"
    straight = top_eigenpairs(DenseMap(matrix), **WANTED)

    def half(basis: Basis, factors: Tensor) -> None:
        for shard in basis.row(0):
            shard.zero_()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Basis, "rotate_", half)
        with pytest.raises(KeyboardInterrupt):
            top_eigenpairs(DenseMap(matrix), resume=path, save_every=0, **WANTED)
    assert path.exists()
    assert_equal(top_eigenpairs(DenseMap(matrix), resume=path, **WANTED), straight)


def test_a_run_that_ended_at_max_products_goes_on_with_more_of_them(tmp_path: Path) -> None:
    matrix, path = symmetric(VALUES), tmp_path / "top.pt"
    straight = top_eigenpairs(DenseMap(matrix), **WANTED)
    for most in (20, 25, 40):
        assert not top_eigenpairs(DenseMap(matrix), resume=path, max_products=most, **WANTED).converged
        assert path.exists()
    assert_equal(top_eigenpairs(DenseMap(matrix), resume=path, **WANTED), straight)


@pytest.mark.parametrize("k", [1, 3])
def test_a_run_whose_first_products_were_too_few_for_a_block_goes_on_with_more(k: int, tmp_path: Path) -> None:
    matrix, path = symmetric(VALUES), tmp_path / "top.pt"
    straight = top_eigenpairs(DenseMap(matrix), k)
    for most in range(2 * k, 2 * k + 4):
        assert top_eigenpairs(DenseMap(matrix), k, resume=path, max_products=most).products <= most
    found = top_eigenpairs(DenseMap(matrix), k, resume=path)
    assert found.converged
    torch.testing.assert_close(found.values, straight.values)


def test_a_process_that_is_killed_leaves_the_last_saved_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, path = symmetric(VALUES), tmp_path / "top.pt"
    with monkeypatch.context() as patch:  # killed: nothing is saved on the way out, and a save may be half done
        patch.setattr("pipeline.curvature.estimates.resume.RunFiles.rescue", lambda *arguments: None)
        with pytest.raises(KeyboardInterrupt):
            top_eigenpairs(Interrupted(matrix, [9]), resume=path, save_every=0, **WANTED)
    path.with_name("top.pt.part").write_bytes(b"half")
    rest = Interrupted(matrix, [])
    assert_equal(top_eigenpairs(rest, resume=path, **WANTED), top_eigenpairs(DenseMap(matrix), **WANTED))
    assert rest.calls == calls_of_a_whole_run() - 8


@pytest.mark.parametrize(
    "change, words",
    [
        ({"k": 2}, "is the state of another run: k was 3 and is 2. Call with what it was to go on, or delete the file"),
        ({"seed": 1, "tol": 1e-8}, "tol was 1e-09 and is 1e-08, seed was 0 and is 1"),
        ({"which": "LA"}, "which was 'LM' and is 'LA'"),
    ],
)
def test_the_state_of_a_run_with_other_settings_is_refused_in_words(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    matrix, path = symmetric(VALUES), tmp_path / "top.pt"
    top_eigenpairs(DenseMap(matrix), resume=path, max_products=20, **WANTED)
    with pytest.raises(ResumeError, match=words):
        top_eigenpairs(DenseMap(matrix), resume=path, **{**WANTED, **change})
    assert path.exists()


def test_the_state_of_another_matrix_and_a_file_that_is_none_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "top.pt"
    top_eigenpairs(DenseMap(symmetric(VALUES)), resume=path, max_products=20, **WANTED)
    with pytest.raises(ResumeError, match="is the state of another run: fingerprint was '.*' and is '"):
        top_eigenpairs(DenseMap(symmetric(VALUES + 1)), resume=path, **WANTED)
    for rubbish in (b"", b"no file of ours", path.read_bytes()[:-100]):
        path.write_bytes(rubbish)
        with pytest.raises(ResumeError, match="cannot be read as the state of a run .* Delete it to begin anew"):
            top_eigenpairs(DenseMap(symmetric(VALUES)), resume=path, **WANTED)


@pytest.mark.parametrize("wrong", [True, 3, b"run.pt"])
def test_what_is_no_path_or_no_number_of_seconds_is_refused_in_words(wrong: Any, tmp_path: Path) -> None:
    A = DenseMap(symmetric(VALUES))
    with pytest.raises(TypeError, match=f"resume is {wrong!r}. Give a path: a str, or a pathlib.Path"):
        top_eigenpairs(A, resume=wrong, **WANTED)
    with pytest.raises(TypeError, match="save_every is 'minute'. Give a number"):
        top_eigenpairs(A, resume=tmp_path / "run.pt", save_every="minute", **WANTED)  # type: ignore[arg-type]
    for nameless in ("", ".", "/"):
        with pytest.raises(ResumeError, match=f"resume is '{nameless}', which names no file. Give one, such as"):
            top_eigenpairs(A, resume=nameless, **WANTED)


def test_a_state_with_a_changed_byte_is_refused_or_goes_on_as_it_was(tmp_path: Path) -> None:
    path, matrix = tmp_path / "top.pt", symmetric(VALUES)
    top_eigenpairs(DenseMap(matrix), resume=path, max_products=20, **WANTED)
    whole, refused = path.read_bytes(), 0
    expected = top_eigenpairs(DenseMap(matrix), resume=path, **WANTED)
    places = range(0, len(whole), len(whole) // 40)
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x21]) + whole[place + 1:])
        try:
            assert top_eigenpairs(DenseMap(matrix), resume=path, **WANTED).values.equal(expected.values)
        except ResumeError:
            refused += 1
    assert refused > len(places) / 2


def test_a_state_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"settings": Evil()}, tmp_path / "top.pt")
    with pytest.raises(ResumeError, match="cannot be read"):
        top_eigenpairs(DenseMap(symmetric(VALUES)), resume=tmp_path / "top.pt", **WANTED)
    assert not (tmp_path / "ran").exists()


def test_an_error_is_told_even_where_the_state_cannot_be_saved(tmp_path: Path) -> None:
    class Gone(Interrupted):
        def products(self, vectors: Sequence[Vec]) -> list[Vec]:
            if self.calls == 2:
                folder.rmdir()
            return super().products(vectors)

    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt) as caught:
        top_eigenpairs(Gone(symmetric(VALUES), [3]), resume=folder / "top.pt", **WANTED)
    assert "could not be saved" in caught.value.__notes__[0]


def test_saves_that_fail_in_the_same_way_are_told_once(tmp_path: Path) -> None:
    class Gone(DenseMap):
        def products(self, vectors: Sequence[Vec]) -> list[Vec]:
            shutil.rmtree(tmp_path / "folder", ignore_errors=True)
            return super().products(vectors)

    (tmp_path / "folder").mkdir()
    with pytest.raises(ResumeError, match="could not be saved") as caught:
        top_eigenpairs(Gone(symmetric(VALUES)), resume=tmp_path / "folder" / "top.pt", save_every=0, **WANTED)
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("values", [VALUES, torch.linspace(1, 6, 500).double()], ids=len)
def test_a_full_disk_is_told_in_words_and_hides_no_error(values: Tensor, tmp_path: Path) -> None:
    path, A = tmp_path / "top.pt", Interrupted(symmetric(values), [3])
    (tmp_path / "top.pt.part").symlink_to("/dev/full")
    with pytest.raises(KeyboardInterrupt) as caught:
        top_eigenpairs(A, resume=path, **WANTED)
    assert f"could not be saved at {path}: [Errno 28] No space left" in caught.value.__notes__[0]
    (tmp_path / "top.pt.part").symlink_to("/dev/full")
    with pytest.raises(ResumeError, match="could not be saved at .*No space left"):
        top_eigenpairs(A, resume=path, save_every=0, **WANTED)


def test_a_folder_that_is_not_there_is_told_before_the_first_product(tmp_path: Path) -> None:
    A = DenseMap(symmetric(VALUES))
    with pytest.raises(ResumeError, match="none is no folder: make it"):
        top_eigenpairs(A, resume=tmp_path / "none" / "top.pt", **WANTED)
    assert A.asked == 0


def test_saves_are_as_far_apart_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    saves = RunFiles(tmp_path / "run.pt", DenseSpace(3), {}, every=60)
    now += 59
    assert not saves.due()
    now += 1
    assert saves.due()
    saves.write(1, {})
    assert not saves.due()


# ------------------------------------------------------------------------------------------------ the other estimators

SPECTRUM = symmetric(torch.cat([torch.tensor([9.0, 7.0, -4.0]), torch.linspace(-0.3, 1.0, 27)]))
ESTIMATES: dict[str, Callable[..., Result]] = {
    "hutchinson": partial(trace, samples=18),
    "hutchinson, normal, to a tolerance": partial(trace, samples=29, kind="normal", abs=2.9, min_samples=5),
    "hutch++": partial(trace, samples=25, method="hutch++"),
    "hutch++ of a sketch": partial(trace, samples=28, method="hutch++", sketch=5, abs=0.4, min_samples=6),
    "xtrace": partial(trace, samples=26, method="xtrace"),
    "xtrace to a tolerance": partial(trace, samples=28, method="xtrace", rel=0.05, min_samples=4),
    "a trace that is exact": partial(trace, samples=30),
    "traces of layers": partial(layer_traces, samples=18),
    "the diagonal": partial(diagonal, samples=18, rel=0.2, min_samples=6),
    "the diagonal to a tolerance": partial(diagonal, samples=28, rel=0.5, min_samples=6),
    "the diagonal, exact": partial(diagonal, samples=30),
    "the norm": partial(frobenius_squared, samples=18),
    "the density": partial(density, steps=9, runs=6),
    "the density, all of it": partial(density, steps=40, runs=3),
}
every_estimate = pytest.mark.parametrize("name", ESTIMATES)


def solving(A: LinearMap, **options: Any) -> Result:
    """A system, with a weight for each direction where it is to be preconditioned, and a first guess."""
    b, start = A.space.random("normal", 5, 0), A.space.random("rademacher", 5, 1)
    weights = [part.abs() + 1.0 for part in A.space.random("normal", 5, 2)]
    return solve(A, b, start=start, preconditioner=weights, damping=5.0, tol=1e-9, **options)


SOLVES: dict[str, Callable[..., Result]] = {
    "conjugate gradients": solving,
    "conjugate gradients, plain": lambda A, **how: solve(A, A.space.random("normal", 5, 0), damping=5.0, **how),
    "minres": partial(solving, method="minres"),
    "minres, plain": lambda A, **how: solve(A, A.space.random("normal", 5, 0), method="minres", tol=1e-9, **how),
    "minres that ends early": partial(solving, method="minres", max_products=9),
}
RUNS = {**ESTIMATES, **SOLVES}
every_run = pytest.mark.parametrize("name", RUNS)


def fields_of(result: Result) -> list[Any]:
    """All that it holds, in plain numbers."""
    values = [value for _, value in sorted(vars(result).items())]
    parts = [part for value in values for part in (value.values() if isinstance(value, dict) else [value])]
    return [[str(part) for part in value.items()] if isinstance(value, dict) else str(value) for value in values] + [
        part.double().flatten().tolist() for part in parts if isinstance(part, Tensor)
    ]


@every_run
def test_every_estimate_that_is_interrupted_at_any_product_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    estimate, path = RUNS[name], tmp_path / "run.pt"
    whole = Interrupted(SPECTRUM, [])
    straight = estimate(whole)
    for at in range(1, whole.calls + 1, either(5, 1)):
        with pytest.raises(KeyboardInterrupt):
            estimate(Interrupted(SPECTRUM, [at]), resume=path)
        rest = Interrupted(SPECTRUM, [])
        assert fields_of(estimate(rest, resume=path)) == fields_of(straight)
        twice = rest.calls - (whole.calls - at + 1)
        assert twice in ((0, 1) if "xtrace" in name else (0,))  # of a pair of calls the first is made again
        assert not list(tmp_path.iterdir())


@every_run
def test_an_estimate_that_is_interrupted_while_it_is_saved_goes_on_to_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after its last product, which may have brought its error to where it ends."""
    estimate, path, saves = RUNS[name], tmp_path / "run.pt", 0
    straight = fields_of(estimate(DenseMap(SPECTRUM)))

    def interrupted(*arguments: Any) -> None:
        nonlocal saves
        saves -= 1
        if saves == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFiles, "save", interrupted)
    for at in itertools.count(1):
        saves = at
        try:
            estimate(DenseMap(SPECTRUM), resume=path, save_every=0)
        except KeyboardInterrupt:
            saves = 0
            assert fields_of(estimate(DenseMap(SPECTRUM), resume=path)) == straight
        else:
            break
    assert at > 2


@pytest.mark.parametrize("at, late", either([(3, True)], [(2, False), (3, True), (4, False), (4, True)]))
@every_run
def test_every_estimate_over_ranks_goes_on_to_the_same_bits(name: str, at: int, late: bool, tmp_path: Path) -> None:
    estimate, path = RUNS[name], tmp_path / "run.pt"
    straight = over_ranks(SPECTRUM, 2, estimate, tied=4)
    with pytest.raises(OSError, match="the machine is gone"):
        over_ranks(SPECTRUM, 2, lambda A: estimate(failing(A, at, late), resume=path, save_every=0), tied=4)
    again = over_ranks(SPECTRUM, 2, lambda A: estimate(A, resume=path), tied=4)
    assert [fields_of(each) for each in again] == [fields_of(each) for each in straight]
    assert not list(tmp_path.iterdir())


@every_estimate
def test_an_estimate_does_not_go_on_from_another_ones_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    with pytest.raises(KeyboardInterrupt):
        ESTIMATES[name](Interrupted(SPECTRUM, [3]), resume=path)
    with pytest.raises(ResumeError, match="is the state of another run: .*seed was 0 and is 1"):
        ESTIMATES[name](DenseMap(SPECTRUM), resume=path, seed=1)
    with pytest.raises(ResumeError, match="is the state of another run: fingerprint was"):
        ESTIMATES[name](DenseMap(SPECTRUM + torch.eye(30)), resume=path)
    with pytest.raises(ResumeError, match="is the state of another run: .*file was"):
        top_eigenpairs(DenseMap(SPECTRUM), resume=path)


@every_estimate
def test_processes_that_give_an_estimator_other_arguments_are_told(name: str) -> None:
    """Random vectors of two seeds would be no vectors of the whole space where a parameter is tied."""
    words = "seed differ between the ranks: rank 0: 0; rank 1: 1. Give each process the same."
    with pytest.raises(MismatchError, match=words):
        over_ranks(SPECTRUM, 2, lambda A: ESTIMATES[name](A, seed=A.space.rank), tied=4)


def test_processes_that_solve_other_systems_are_told() -> None:
    with pytest.raises(MismatchError, match="damping differ between the ranks: rank 0: 5.0; rank 1: 6.0. Give each"):
        over_ranks(SPECTRUM, 2, lambda A: solve(A, A.space.random("normal", 5, 0), damping=5.0 + A.space.rank), tied=4)


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_a_system_of_several_rounds_goes_on_in_the_round_where_it_was(method: str, tmp_path: Path) -> None:
    """In float32 a system takes several rounds."""
    matrix, path = SPECTRUM.float(), tmp_path / "run.pt"
    b = DenseSpace(30, torch.float32).random("normal", 5, 2)
    system = partial(solve, b=b, damping=5.0, tol=1e-7, max_products=60, method=method)
    whole = Interrupted(matrix, [])
    straight = fields_of(system(whole))
    for at in range(2, whole.calls + 1, either(3, 1)):
        with pytest.raises(KeyboardInterrupt):
            system(Interrupted(matrix, [at]), resume=path)
        rest = Interrupted(matrix, [])
        assert fields_of(system(rest, resume=path)) == straight and rest.calls == whole.calls - at + 1
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_state_that_is_being_written_is_not_saved_over_a_good_one_in_inference_mode_either(
    is_inference: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, straight = tmp_path / "run.pt", fields_of(diagonal(DenseMap(SPECTRUM), 18))
    for at in range(1, 9):
        with interrupted_at(at, monkeypatch), torch.inference_mode(is_inference), pytest.raises(KeyboardInterrupt):
            diagonal(DenseMap(SPECTRUM), 18, resume=path)
        with torch.inference_mode(is_inference):
            assert fields_of(diagonal(DenseMap(SPECTRUM), 18, resume=path)) == straight


def test_a_solution_does_not_go_on_from_the_file_of_another_system(tmp_path: Path) -> None:
    path, b = tmp_path / "run.pt", DenseSpace(30).random("normal", 5, 0)
    with pytest.raises(KeyboardInterrupt):
        solve(Interrupted(SPECTRUM, [3]), b, damping=5.0, resume=path)
    others: dict[str, dict[str, Any]] = {
        "damping was 5.0 and is 6.0": {"damping": 6.0}, "method was 'cg' and is 'minres'": {"method": "minres"},
        "tol was 1e-06 and is 0.1": {"tol": 0.1}, "start was": {"start": b},
        "preconditioner was": {"preconditioner": b}, "b was": {"b": [2.0 * part for part in b]},
    }  # fmt: skip
    for words, change in others.items():
        with pytest.raises(ResumeError, match=f"is the state of another run: {words}"):
            solve(DenseMap(SPECTRUM), **{"b": b, "damping": 5.0, **change}, resume=path)


def test_a_state_is_whole_whenever_the_interrupt_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between products too, in the midst of what is made of them."""
    for name in ("the diagonal", "the density", "hutch++", "xtrace", "conjugate gradients", "minres"):
        estimate, path = RUNS[name], tmp_path / "run.pt"
        straight = fields_of(estimate(DenseMap(SPECTRUM)))
        for at in either([3, 8, 21], range(1, 40)):
            with interrupted_at(at, monkeypatch):
                try:
                    estimate(DenseMap(SPECTRUM), resume=path, save_every=0)
                except KeyboardInterrupt:
                    pass
            assert fields_of(estimate(DenseMap(SPECTRUM), resume=path)) == straight, (name, at)


@contextmanager
def interrupted_at(at: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, one operation of vectors ends with an interrupt after it has half happened."""
    left = at

    def once(real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        result = real(*arguments, **options)
        if left == 0:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        methods: dict[type, Sequence[str]] = {
            Basis: ["append", "subtract_"], DenseSpace: ["dots", "sum_over"], Tensor: ["addcmul_", "mul_"],
        }  # fmt: skip
        for cls, names in methods.items():
            for name in names:
                patch.setattr(cls, name, partialmethod(once_of(once, getattr(cls, name))))
        yield


def once_of(once: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: once(real, *arguments, **options)


# ----------------------------------------------------------------------------------------------------- over ranks


class OneFails(RankMap):
    """Rank 1 ends with an error at its n-th call, before or after the others have its part of that product."""

    calls, at, late = 0, 0, False

    def products(self, vectors: Sequence[Vec]) -> list[Vec]:
        self.calls += 1
        failing = self.calls == self.at and self.space.rank == 1
        if failing and not self.late:
            raise OSError("the machine is gone")
        images = super().products(vectors)
        if failing:
            raise OSError("the machine is gone")
        return images


def failing(A: RankMap, at: int, late: bool) -> OneFails:
    other = OneFails(A.matrix, A.space, A.block)
    other.at, other.late = at, late
    return other


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", [1, 2, 7, 16])
def test_over_ranks_a_run_goes_on_from_a_step_that_all_have(tmp_path: Path, at: int, late: bool) -> None:
    matrix, path = symmetric(VALUES), tmp_path / "top.pt"
    straight = over_ranks(matrix, 2, lambda A: top_eigenpairs(A, **WANTED), tied=4)
    with pytest.raises(OSError, match="the machine is gone"):
        over_ranks(
            matrix, 2, lambda A: top_eigenpairs(failing(A, at, late), resume=path, save_every=0, **WANTED), tied=4
        )
    assert {"top.rank0of2.pt", "top.rank1of2.pt"} <= {file.name for file in tmp_path.iterdir()}
    again = over_ranks(matrix, 2, lambda A: top_eigenpairs(A, resume=path, **WANTED), tied=4)
    for one, other in zip(straight, again, strict=True):
        assert_equal(one, other)
    assert not list(tmp_path.iterdir())


def test_ranks_whose_last_saves_are_a_step_apart_begin_at_the_common_one(tmp_path: Path) -> None:
    def last_saves(A: RankMap) -> Any:
        saves = RunFiles(tmp_path / "run.pt", A.space, {})
        for step in (3, 4, 5)[: 2 + A.space.rank]:
            saves.write(step, {"step": step, "rank": A.space.rank})
        A.space.exchange(A.space.rank, None)
        return RunFiles(tmp_path / "run.pt", A.space, {}).latest()

    found = over_ranks(torch.eye(4), 2, last_saves)
    assert found == [{"step": 4, "rank": 0}, {"step": 4, "rank": 1}]


def test_ranks_that_have_the_same_two_steps_begin_at_the_later_one(tmp_path: Path) -> None:
    def last_saves(A: RankMap) -> Any:
        saves = RunFiles(tmp_path / "run.pt", A.space, {})
        for step in (3, 4, 5):
            saves.write(step, step)
        A.space.exchange(A.space.rank, None)
        return RunFiles(tmp_path / "run.pt", A.space, {}).latest()

    assert over_ranks(torch.eye(4), 2, last_saves) == [5, 5]


def test_a_rank_without_its_file_is_told_on_all_ranks(tmp_path: Path) -> None:
    def latest(A: RankMap) -> str:
        saves = RunFiles(tmp_path / "run.pt", A.space, {})
        if A.space.rank == 1:
            saves.write(3, {})
        A.space.exchange(A.space.rank, None)
        with pytest.raises(ResumeError) as caught:
            saves.latest()
        return str(caught.value)

    for told in over_ranks(torch.eye(4), 2, latest):
        assert "no step of the run is on all processes (rank 0 has none; rank 1 has 3)" in told


def test_a_file_that_one_rank_refuses_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    def latest(A: RankMap) -> str:
        RunFiles(tmp_path / "run.pt", A.space, {"seed": 0}).write(3, {})
        A.space.exchange(A.space.rank, None)
        with pytest.raises(ResumeError) as caught:
            RunFiles(tmp_path / "run.pt", A.space, {"seed": A.space.rank}).latest()
        return str(caught.value)

    mine, other = over_ranks(torch.eye(4), 2, latest)
    assert "rank 1 cannot go on with its file" in mine
    assert "seed was 0 and is 1" in other


def test_the_file_of_another_rank_is_refused(tmp_path: Path) -> None:
    matrix, path = symmetric(VALUES), tmp_path / "top.pt"
    with pytest.raises(OSError, match="the machine is gone"):
        over_ranks(matrix, 2, lambda A: top_eigenpairs(failing(A, 7, False), resume=path, save_every=0, **WANTED))
    (tmp_path / "top.rank1of2.pt").replace(tmp_path / "top.rank0of2.pt")
    with pytest.raises(ResumeError, match="rank was '1 of 2' and is '0 of 2'|rank 0 cannot go on with its file"):
        over_ranks(matrix, 2, lambda A: top_eigenpairs(A, resume=path, **WANTED))


def test_a_file_that_one_rank_cannot_save_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    def unsaved(A: RankMap) -> str:
        with pytest.raises(ResumeError) as caught:
            top_eigenpairs(A, resume=tmp_path / "top.pt", save_every=0, **WANTED)
        return str(caught.value)

    (tmp_path / "top.rank1of2.pt.part").mkdir()
    mine, other = over_ranks(symmetric(VALUES), 2, unsaved)
    assert "rank 1 cannot go on with its file" in mine
    assert "could not be saved" in other


def test_no_thread_of_these_tests_is_left() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
