"""Values that torch has marked as conjugate or negative, and not computed yet, cross stages as any others do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import NoChunk, Pipe
from pipeline.data.pytrees import checksums, same_checksums
from pipeline.recompute.fingerprints import entries, same_entries
from pipeline.skip import pop, skippable, stash

ROWS, WIDTH = 6, 3


class Apply(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@skippable(stash=["lazy"])
class Stash(nn.Module):
    def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
        yield stash("lazy", x.conj().imag)
        return x


@skippable(pop=["lazy"])
class Pop(nn.Module):
    def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
        skip = yield pop("lazy")
        return x.abs() + skip


def real(z: Tensor) -> Tensor:
    return z.real * 2 + z.imag


VALUES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "conjugate": (lambda z: z.conj(), real),
    "transposed conjugate": (lambda z: z.mT.conj().mT, real),
    "negative": (lambda z: z.conj().imag, lambda v: v * 2),
    "negative beside its base": (lambda z: (z, z.conj().imag), lambda pair: pair[0].abs() + pair[1]),
    "conjugate beside its base": (lambda z: (z, z.conj()), lambda pair: (pair[0] * pair[1]).real),
    "0-d negative": (lambda z: (z, z[0, 0].conj().imag), lambda pair: pair[0].abs() + pair[1]),
    "0-d conjugate": (lambda z: (z, z[0, 0].conj()), lambda pair: (pair[0] * pair[1]).real),
}


def model_of(name: str) -> nn.Sequential:
    torch.manual_seed(1)
    if name == "skip":
        return nn.Sequential(Complex(), Stash(), Complex(), Pop())
    make, read = VALUES[name]
    return nn.Sequential(Complex(), Apply(make), Apply(read), nn.Identity())


def check(model: nn.Sequential, x: Any, pieces: list[Any], policy: str, entry: str, schedule: str) -> None:
    """Against the plain module, chunk by chunk."""
    params = list(model.parameters())
    out = torch.cat([model(piece) for piece in pieces])
    expected = torch.autograd.grad(out.square().sum(), params)
    pipe = Pipe(model, [2, 1, 1], len(pieces), checkpoint=policy, schedule=schedule, mixes_rows=True)
    for _ in range(3):
        pipe.zero_grad()
        found: tuple[Any, ...] = ()
        if entry == "step":
            step = pipe.step(x, loss_fn=lambda made, _: made.square().sum(), loss_reduction="sum", outputs=True)
            made, found = step.outputs, tuple([param.grad for param in params])
        elif entry == "no_grad":
            with torch.no_grad():
                made = pipe(x)
        else:
            made = pipe(x)
            found = torch.autograd.grad(made.square().sum(), params, create_graph=entry == "create_graph")
        torch.testing.assert_close(made, out, rtol=1e-13, atol=1e-13)
        for one, other in zip(found, expected, strict=False):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", [*VALUES, "skip"])
@pytest.mark.parametrize("policy", ["always", "never"])
@pytest.mark.parametrize("entry", ["step", "forward", "create_graph", "no_grad"])
def test_lazy_values_cross_stages(name: str, policy: str, entry: str) -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.complex128)
    for count, schedule in ((1, "1f1b"), (3, "zb-h1")):
        check(model_of(name), x, list(x.tensor_split(count)), policy, entry, schedule)


@pytest.mark.parametrize("policy", ["always", "never"])
@pytest.mark.parametrize("entry", ["step", "forward", "create_graph", "no_grad"])
def test_lazy_inputs_are_cut_and_kept(policy: str, entry: str) -> None:
    whole = torch.randn(ROWS, WIDTH, dtype=torch.complex128)
    mark = torch.randn(WIDTH, dtype=torch.complex128).conj().imag
    for x in (whole.conj(), whole.conj().imag.to(whole.dtype).conj()):
        model = nn.Sequential(Complex(), Apply(real), nn.Identity(), nn.Identity())
        check(model, x, list(x.tensor_split(3)), policy, entry, "1f1b")
        model = nn.Sequential(Apply(lambda pair: pair[0] + pair[1]), Complex(), Apply(real), nn.Identity())
        pieces = [(piece, mark) for piece in x.tensor_split(3)]
        check(model, (x, NoChunk(mark)), pieces, policy, entry, "1f1b")


@pytest.mark.parametrize("entry", ["step", "forward"])
def test_a_gradient_comes_to_what_a_lazy_input_was_made_of(entry: str) -> None:
    found = []
    for is_piped in (False, True):
        torch.manual_seed(2)
        base = torch.randn(ROWS, WIDTH, dtype=torch.complex128, requires_grad=True)
        model = nn.Sequential(Complex(), Apply(lambda z: z.conj().imag), Apply(lambda v: v * 2))
        if not is_piped:
            model(base.conj()).square().sum().backward()
        elif entry == "forward":
            Pipe(model, [1, 1, 1], 3, checkpoint="always")(base.conj()).square().sum().backward()
        else:
            lazy = base.conj()
            pipe = Pipe(model, [1, 1, 1], 3, checkpoint="always")
            pipe.step(lazy, loss_fn=lambda out, _: out.square().sum(), loss_reduction="sum")
        found.append([base.grad, model[0].weight.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_a_base_that_is_written_where_its_lazy_view_crosses_too_is_refused() -> None:
    """The plain module would see the view written; what crosses is a copy."""

    def written(pair: tuple[Tensor, Tensor]) -> Tensor:
        z, view = pair
        return (z.mul_(2) * view).real

    model = nn.Sequential(Complex(), Apply(lambda z: (z, z.conj())), Apply(written))
    x = torch.randn(ROWS, WIDTH, dtype=torch.complex128)
    with pytest.raises(RuntimeError, match="shares memory with it"):
        Pipe(model, [2, 1], 3)(x)


@pytest.mark.parametrize("lazy", [
    lambda z: z.conj(), lambda z: z.conj().imag, lambda z: z[0, 0].conj(), lambda z: z[0, 0].conj().imag,
])
def test_what_a_recomputation_is_compared_by_is_the_value(lazy: Callable[[Tensor], Tensor]) -> None:
    value = lazy(torch.randn(4, 4, dtype=torch.complex64))
    plain = value.resolve_conj().resolve_neg()
    assert same_entries(entries([value]), entries([plain])) and same_entries(entries([plain]), entries([value]))
    assert same_checksums(checksums([value]), checksums([plain]))
    assert not same_entries(entries([value]), entries([-plain]))
