"""Are the spectra of layers those of the dense blocks, in one run that may be interrupted?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from law_models import normal
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian
from pipeline.curvature.estimates.resume import ResumeError
from pipeline.curvature.operators import Operator
from pipeline.curvature.results.result import Result
from pipeline.curvature.space import Vec

SIZES = {"0": 20, "2": 30, "4": 12}


class Interrupted(Hessian):
    """Ends with an error in place of its n-th call of `products`, blocks' calls among them."""

    calls = [0, 0]  # so far; the one that fails

    def products(self, vectors: Sequence[Vec]) -> list[Vec]:
        self.calls[0] += 1
        if self.calls[0] == self.calls[1]:
            raise KeyboardInterrupt
        return super().products(vectors)


def hessian(kind: type[Hessian] = Hessian) -> Hessian:
    torch.manual_seed(2)
    layers = nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)
    pipe = Pipe(nn.Sequential(*layers).double(), [2, 3], chunks=2)
    return kind(pipe, (normal(9, 3), normal(9, 2, seed=2)), functional.mse_loss, seed=1)


def test_densities_of_layers_are_those_of_the_dense_blocks() -> None:
    H = hessian()
    dense = H @ torch.eye(H.shape[0]).double()
    found, start = H.layer_densities(steps=40, runs=3), 0
    assert found.names == list(SIZES)
    for name, size in SIZES.items():
        values = torch.linalg.eigvalsh(dense[start : start + size, start : start + size])
        start += size
        assert found[name].size == size
        assert found[name].nodes.min() == pytest.approx(float(values.min()), abs=1e-9)
        assert found[name].nodes.max() == pytest.approx(float(values.max()), abs=1e-9)
        nearest = (found[name].nodes[..., None] - values).abs().amin(-1)
        assert float(nearest[found[name].weights > 1e-9].max()) < 1e-9  # as many steps as rows find them all


def test_a_layer_with_fewer_entries_than_eigenvalues_are_asked_for_gives_all_of_its_own() -> None:
    found = hessian().per_layer(3, groups={"bias": ["4.bias"], "weight": ["4.weight"]})
    assert dict(zip(found.names, (~found.values.isnan()).sum(1).tolist(), strict=True)) == {"bias": 2, "weight": 3}


class Idle(nn.Module):
    """A layer of which a part computes nothing, as an expert does to which no row goes."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).tanh()


@pytest.mark.parametrize("kind", [Hessian, GaussNewton, EmpiricalFisher])
def test_a_layer_on_which_the_loss_does_not_depend_has_a_block_of_zeros(kind: type[Operator]) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(Idle(), nn.Linear(2, 2)).double()
    A = kind(Pipe(model, [1, 1], chunks=2), (normal(5, 3), normal(5, 2, seed=2)), functional.mse_loss)
    found = A.per_layer(2, samples=3)
    assert found.names == ["0.used", "0.idle", "1"] and found.traces is not None
    assert found.values.any(1).tolist() == found.traces.bool().tolist() == [True, False, True]
    densities = A.layer_densities(steps=5, runs=2)
    assert not densities["0.idle"].nodes.any() and densities["0.used"].nodes.any()
    (row,) = [line for line in str(densities).splitlines() if "0.idle" in line]
    assert "100 %" not in row  # below 0


def test_groups_are_blocks_of_their_own() -> None:
    found = hessian().layer_densities(steps=10, runs=2, groups={"ends": ["0.weight", "4.bias"]})
    assert found.names == ["ends"] and found["ends"].size == 17


@pytest.mark.parametrize("what", ["layer_densities", "per_layer"])
def test_groups_with_a_name_that_is_none_of_a_parameter_are_refused(what: str) -> None:
    with pytest.raises(ValueError, match=r"no process has parameters named \['4.weights'\] that count"):
        getattr(hessian(), what)(groups={"last": ["4.weights", "4.bias"]})


@pytest.mark.parametrize("what", ["layer_densities", "per_layer"])
def test_a_run_over_layers_that_is_interrupted_goes_on_to_the_same_bits(what: str, tmp_path: Path) -> None:
    options = {"steps": 6, "runs": 2} if what == "layer_densities" else {"k": 2, "tol": 1e-8, "samples": 8}
    Interrupted.calls[:] = 0, 0
    straight, path = getattr(hessian(Interrupted), what)(**options), tmp_path / "run.pt"
    whole = Interrupted.calls[0]
    straight.save(tmp_path / "straight.json")
    for at in [*range(1, whole, 5), whole]:  # the last ones are of the traces
        Interrupted.calls[:] = 0, at
        with pytest.raises(KeyboardInterrupt):
            getattr(hessian(Interrupted), what)(resume=path, **options)
        Interrupted.calls[:] = 0, 0
        getattr(hessian(Interrupted), what)(resume=path, **options).save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_text() == (tmp_path / "straight.json").read_text()
        assert Interrupted.calls[0] <= whole - at + 1 + 2  # an eigenpair's residuals are computed again
        assert {file.name for file in tmp_path.iterdir()} == {"again.json", "straight.json"}


def test_layers_of_another_matrix_are_refused(tmp_path: Path) -> None:
    Interrupted.calls[:] = 0, 6
    with pytest.raises(KeyboardInterrupt):
        hessian(Interrupted).layer_densities(steps=6, runs=2, resume=tmp_path / "run.pt")
    H = hessian()
    G = GaussNewton(H.pipe, (normal(9, 3), normal(9, 2, seed=2)), functional.mse_loss, seed=1)
    with pytest.raises(ResumeError, match="is the state of another run: matrix was 'Hessian'"):
        G.layer_densities(steps=6, runs=2, resume=tmp_path / "run.pt")


def test_densities_of_layers_print_a_row_each_are_drawn_and_kept_in_files(tmp_path: Path) -> None:
    found = hessian().layer_densities(steps=8, runs=2)
    lines = str(found).splitlines()
    assert lines[0] == "spectral densities of layers of Hessian" and len(lines) == 5
    assert [line.split()[:2] for line in lines[2:]] == [[name, str(size)] for name, size in SIZES.items()]
    ax = found.plot(tmp_path / "layers.svg")
    (mesh, *_) = ax.collections
    counts = 10.0 ** torch.tensor(mesh.get_array()).reshape(3, -1)
    assert (counts * (counts > 0.11)).sum(1).tolist() == pytest.approx(list(SIZES.values()), rel=0.1)
    found.save(tmp_path / "layers.npz")
    again = Result.load(tmp_path / "layers.npz")
    assert torch.equal(again["2"].density, found["2"].density)
