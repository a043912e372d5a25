"""Are products and estimates over ranks those of one process, and those of a matrix that is written out?

    script(make, ...)  the same calls in one process and over ranks  -->  what each found, by name, for one_and_many.py
    dense(...)         the plain module's matrix, entry by entry     -->  each found product is compared with it
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_and_many import SEED, Compared, Found, Make, compared, differences, in_one_process, over_ranks
from pipeline_probes import outside
from rank_eager import CHECKPOINTS, MODELS
from rank_models import even, padded, rows, square
from replica_faults import Told, told
from replica_training import counted_loss
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.utils import _pytree as pytree

from pipeline import Pipe
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian
from pipeline.curvature.estimates.density import density
from pipeline.curvature.estimates.diagonal import diagonal
from pipeline.curvature.estimates.eigenpairs import top_eigenpairs
from pipeline.curvature.estimates.layer_traces import layer_traces
from pipeline.curvature.estimates.resume import file_of_rank
from pipeline.curvature.estimates.solve import solve
from pipeline.curvature.estimates.trace import trace
from pipeline.curvature.operators import Operator

MATRICES: dict[str, type[Operator]] = {"H": Hessian, "G": GaussNewton, "F": EmpiricalFisher}
Data = list[tuple[Tensor, Tensor]]


def curved(output: Tensor, target: Tensor) -> Tensor:
    """A mean over rows, whose own second derivative is neither constant nor positive."""
    return ((output - target).square() + (output * target).sin()).sum(1).mean()


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return counted_loss(output, target)


def dropping(stages: int) -> nn.Sequential:
    """Dropout, of which every stage has some."""
    kinds = [nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 4)]
    return nn.Sequential(*kinds, nn.Sigmoid(), nn.Dropout(0.2), nn.Linear(4, 4)).double()


NETWORKS = {**MODELS, "dropping": dropping}
LOSSES: dict[str, Any] = {"square": square, "curved": curved, "counted": counted}
NEAR = 1e-7  # sums over ranks are added in another order than in one process, and eigenvectors are known to 1e-8 or so


# -------------------------------------------------------------------------------------------------- what is multiplied


def data_of(counts: Iterable[int]) -> Data:
    """Mini-batches of so many rows."""
    return [(rows(count, seed=index), rows(count, seed=40 + index)) for index, count in enumerate(counts)]


def model_of(name: str, stages: int) -> nn.Sequential:
    torch.manual_seed(3)
    model = NETWORKS[name](stages)
    for buffer in model.buffers():  # running statistics that change what eval mode computes
        if buffer.is_floating_point():
            buffer.add_(torch.rand_like(buffer))
    return model


def by_all_names(pipe: Pipe, named: Mapping[str, Tensor], what: str) -> Found:
    """This process's entries under all names of each parameter."""
    first = {id(parameter): name for name, parameter in pipe.named_parameters()}
    return {
        f"{what} {name}": named[first[id(parameter)]].clone()
        for name, parameter in pipe.named_parameters(remove_duplicate=False)
        if first[id(parameter)] in named
    }


def drawn(pipe: Pipe, names: Iterable[str], number: int) -> dict[str, Tensor]:
    """A vector that is the same over ranks and in one process, made by none of what is tested."""
    found = {}
    for name, parameter in pipe.named_parameters():
        if name in names:
            digest = hashlib.sha256(f"{name} {number}".encode()).digest()
            found[name] = rows(parameter.numel(), 1, seed=int.from_bytes(digest[:4], "little")).view(parameter.shape)
    return found


class Untouched:
    """Within: nothing that a product must leave alone may change."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        for number, parameter in enumerate(pipe.parameters()):
            if parameter.requires_grad and number % 2:
                parameter.grad = torch.ones_like(parameter)

    def _now(self) -> tuple[list[Tensor], list[Tensor | None], list[bool], Tensor]:
        tensors = [*self._pipe.parameters(), *self._pipe.buffers()]
        grads = [parameter.grad for parameter in self._pipe.parameters()]
        values = [each.detach().clone() for each in [*tensors, *grads] if each is not None]
        return values, grads, [module.training for module in self._pipe.modules()], torch.get_rng_state()

    def __enter__(self) -> None:
        self._before = self._now()

    def __exit__(self, *how: object) -> None:
        (values, grads, flags, state), before = self._now(), self._before
        assert all(map(torch.equal, values, before[0])), "parameters, buffers or gradients were written"
        assert all(one is other for one, other in zip(grads, before[1], strict=True)), "gradients were replaced"
        assert flags == before[2], "modes were changed"
        assert torch.equal(state, before[3]), "the generator was moved"


def multiplied(
    make: Make,
    model: str,
    stages: int,
    matrix: str,
    loss: str = "curved",
    counts: Iterable[int] = (9,),
    training: bool = False,
    params: Any = None,
    chunks: int = 4,
    checkpoint: str = "always",
    **settings: Any,
) -> Found:
    """Products with three vectors, two at a time; with one, and the gradient; the loss; and nothing else is changed."""
    network = model_of(model, stages)
    pipe = make(network, even(len(network), stages), chunks, checkpoint=CHECKPOINTS[checkpoint], **settings)
    A = MATRICES[matrix](pipe, data_of(counts), LOSSES[loss], params=params, training=training, seed=11, block=2)
    vectors = [drawn(pipe, A.space.slots, number) for number in range(3)]
    with Untouched(pipe):
        several = A @ vectors
        one, gradient = A.hvp(vectors[1])
        more = {"loss": A.loss(), "size": A.shape[0]}
    found = {**more, **by_all_names(pipe, gradient, "gradient"), **by_all_names(pipe, one, "hvp")}
    for number, product in enumerate(several):
        found |= by_all_names(pipe, product, f"product {number}")
    if make is in_one_process and not training:
        assert_as_written_out(found, model_of(model, stages), matrix, loss, data_of(counts), params)
    return found


def of_case(make: Make, name: str, stages: int, matrix: str, training: bool, checkpoint: str) -> Found:
    """A model of law_models.py or skip_models.py: skips, trees, BatchNorm, convolutions."""
    case = padded(name, stages)
    cuts, mixes = even(len(case.model), stages), not case.rowwise
    pipe = make(case.model, cuts, 3, checkpoint=CHECKPOINTS[checkpoint], mixes_rows=mixes)

    def loss_fn(output: Any, target: None) -> Tensor:
        return case.loss(output)

    data = (case.make_input(7), None)
    A = MATRICES[matrix](pipe, data, loss_fn, loss_reduction="sum", training=training, seed=11)
    vector = drawn(pipe, A.space.slots, 0)
    with Untouched(pipe):
        product, gradient = A.hvp(vector)
    return {"loss": A.loss(), **by_all_names(pipe, product, "hvp"), **by_all_names(pipe, gradient, "gradient")}


# ---------------------------------------------------------------------------------------- the matrix, entry by entry


def dense(model: nn.Module, matrix: str, loss_fn: Any, data: Data, names: list[str]) -> tuple[Tensor, Tensor]:
    """A matrix in eval mode, and the gradient, by the parameters' names in their order."""
    model.eval()
    named = dict(model.named_parameters())
    sizes = [named[name].numel() for name in names]
    flat = torch.cat([named[name].detach().reshape(-1) for name in names])
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))

    def output_of(values: Tensor) -> Tensor:
        parts = zip(names, values.split(sizes), strict=True)
        given = {name: part.view(named[name].shape) for name, part in parts}
        return functional_call(model, given, (x,), tie_weights=True)  # type: ignore[no-any-return]

    def loss_of(output: Tensor) -> Tensor:
        loss = loss_fn(output, y)
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss

    def row_losses(output: Tensor) -> Tensor:
        """Those whose gradients the Fisher adds up, and what it divides them by."""
        each = [loss_fn(output[row : row + 1], y[row : row + 1]) for row in range(len(y))]
        return torch.stack([loss[0] if isinstance(loss, tuple) else loss for loss in each])

    (gradient,) = torch.autograd.grad(loss_of(output_of(flat.requires_grad_())), flat)
    flat = flat.detach()
    if matrix == "H":
        return hessian(lambda values: loss_of(output_of(values)), flat), gradient
    if matrix == "G":
        J = jacobian(output_of, flat).flatten(0, 1)
        bend = hessian(loss_of, output_of(flat)).reshape(len(J), len(J))
        return J.T @ bend @ J, gradient
    J = jacobian(lambda values: row_losses(output_of(values)), flat)
    whole = loss_fn(output_of(flat), y)
    return J.T @ J / (whole[1] if isinstance(whole, tuple) else len(y)), gradient


def assert_as_written_out(
    found: Found, model: nn.Module, matrix: str, loss: str, data: Data, params: Any
) -> None:
    """What one process found are the entries of the matrix times the vectors."""
    assert isinstance(model, nn.Sequential)
    whole = in_one_process(model, [len(model)])
    names = list(MATRICES[matrix](whole, data, LOSSES[loss], params=params).space.slots)
    entries, gradient = dense(model, matrix, LOSSES[loss], data, names)
    sizes = [dict(model.named_parameters())[name].numel() for name in names]

    def check(what: str, flat: Tensor) -> None:
        parts = dict(zip(names, flat.split(sizes), strict=True))
        for key, value in by_all_names(whole, parts, what).items():
            if key in found:
                apart = float((found[key].reshape(-1) - value).abs().max() / flat.abs().max())
                assert apart <= 1e-12, f"{key} is off by {apart}"

    check("gradient", gradient)
    for number in range(3):
        vector = drawn(whole, names, number)
        product = entries @ torch.cat([vector[name].reshape(-1) for name in names])
        check(f"product {number}", product)
        if number == 1:
            check("hvp", product)


# ------------------------------------------------------------------------------------------------------------ compared


def compare_all(script: str, cases: Iterable[Mapping[str, Any]]) -> list[Compared]:
    """For each case: what differs, by a bit, between what a script of this file finds here and in one process."""
    function: Callable[..., Found] = globals()[script]
    return compared(cases, lambda case: function(in_one_process, **case), lambda case: function(over_ranks, **case))


def compare_close(script: str, cases: Iterable[Mapping[str, Any]]) -> list[Compared]:
    """The same, but for rounding: a convolution may take another kernel for what came in another layout."""
    function: Callable[..., Found] = globals()[script]
    return compared(
        cases, lambda case: function(in_one_process, **case), lambda case: function(over_ranks, **case),
        partial(apart_by_more, 1e-12),
    )  # fmt: skip


def apart_by_more(bound: float, here: Found, alone: Found) -> list[str]:
    """What differs by more than rounding, in words."""
    wrong = [f"{name} is known here alone" for name in here if name not in alone]
    return wrong + [
        f"{name}: {here[name]} instead of {alone[name]}"
        for name in here if name in alone and not near(here[name], alone[name], bound)
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- estimates


def operator_of(make: Make, model: str, stages: int, matrix: str = "H") -> tuple[Pipe, Operator]:
    network = model_of(model, stages)
    pipe = make(network, even(len(network), stages), 3)
    return pipe, MATRICES[matrix](pipe, data_of([6]), curved, seed=11, block=3)


def drawn_by_the_space(make: Make, model: str, stages: int) -> tuple[Found, list[Any]]:
    """Random vectors, their inner products and norms, which are numbers for all ranks; fingerprints before and after
    a change of what one rank has."""
    pipe, A = operator_of(make, model, stages)
    space = A.space
    vecs = [space.random(kind, seed, index) for kind in ("rademacher", "normal") for seed in (0, 1) for index in (0, 1)]
    found: Found = {"size": space.size, "shape": A.shape, "name": A.name}
    for number, vec in enumerate(vecs):
        found |= by_all_names(pipe, space.named(vec), f"{number}")
    numbers = [space.dots(vecs[:3], vecs), [space.norm(vec) for vec in vecs], A.seed]
    prints = [A.fingerprint()]
    for parameter in list(pipe.parameters())[:1] if space.rank == space.ranks - 1 else ():
        parameter.data.add_(1e-3)
    prints.append(A.fingerprint())
    assert prints[0] != prints[1] and operator_of(make, model, stages)[1].fingerprint() == prints[0]
    return {**found, "numbers": numbers}, [numbers, prints]


def estimated(make: Make, model: str, stages: int, what: str) -> tuple[Found, list[Any]]:
    """What an estimator gives: numbers that all ranks have, and entries of the parameters here."""
    pipe, A = operator_of(make, model, stages, "F" if what == "solve" else "H")
    with Untouched(pipe):
        numbers, named = ESTIMATORS[what](A)
    found: Found = {"numbers": numbers}
    for number, each in enumerate(named):
        found |= by_all_names(pipe, each, f"{number}")
    return found, numbers


Estimate = tuple[list[Any], list[dict[str, Tensor]]]


def _trace(A: Operator, method: str) -> Estimate:
    found = trace(A, 12, method=method, seed=5)
    return [found.value, found.stderr, found.samples, found.stopped, found.draws], []


def _eigenpairs(A: Operator) -> Estimate:
    found = top_eigenpairs(A, 3, which="BE", tol=1e-9)
    assert found.converged, found.why
    images = A.products([A.space.vec(each) for each in found.vectors])
    overlaps = A.space.dots(images, [A.space.vec(each) for each in found.vectors])
    assert torch.allclose(overlaps, torch.diag(found.values), atol=1e-8 * found.scale)
    return [found.values], [_turned(A, each) for each in found.vectors]


def _turned(A: Operator, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """An eigenvector, which is one only up to its sign, on one side of a random plane."""
    sign = float(A.space.dots([A.space.vec(named)], [A.space.random("normal", 9, 9)]).sign())
    return {name: sign * part for name, part in named.items()}


def _density(A: Operator) -> Estimate:
    found = density(A, steps=8, runs=4, points=50, sigma=0.2, seed=5)
    return [found.grid, found.density, *found.moment(2)], []


def _solution(A: Operator) -> Estimate:
    found = solve(A, A.space.random("normal", 3, 0), damping=0.3, tol=1e-9)
    assert found.converged
    return [found.products], [found.x]


def _diagonal(A: Operator) -> Estimate:
    found = diagonal(A, 12, seed=5)
    return [found.samples, found.stopped, found.rms, found.rms_stderr], [found.values, found.stderr]


def _layers(A: Operator) -> Estimate:
    found = layer_traces(A, samples=12, seed=5)
    return [found.values, found.stderr, found.entries, found.stopped], []


def _spectra(A: Operator) -> Estimate:
    found = A.per_layer(1, samples=4)
    return [found.names, found.sizes, found.values, found.traces], []


def _checked(A: Operator) -> Estimate:
    found = A.check()
    assert found.ok, found
    return [[what for what in found.what if "double backward" not in what]], []  # of the whole model, in one process


ESTIMATORS: dict[str, Callable[[Operator], Estimate]] = {
    "hutchinson": lambda A: _trace(A, "hutchinson"),
    "hutch++": lambda A: _trace(A, "hutch++"),
    "eigenpairs": _eigenpairs,
    "density": _density,
    "solve": _solution,
    "diagonal": _diagonal,
    "layer traces": _layers,
    "per layer": _spectra,
    "check": _checked,
}


def compare_near(script: str, cases: Sequence[tuple[Any, ...]]) -> list[tuple[Compared, Any]]:
    """For each case: this rank's comparison with one process, but for rounding; and its numbers, to the bit."""
    function: Callable[..., tuple[Found, list[Any]]] = globals()[script]
    numbers: dict[Any, list[Any]] = {}

    def here(case: tuple[Any, ...]) -> Found:
        found, numbers[case] = function(over_ranks, *case)
        return found

    results = compared(cases, lambda case: function(in_one_process, *case)[0], here, partial(apart_by_more, NEAR))
    return [(result, _bits(numbers.get(case, []))) for result, case in zip(results, cases, strict=True)]


def near(one: Any, other: Any, bound: float) -> bool:
    """Whether two results are the same but for rounding."""
    left, spec = pytree.tree_flatten(one)
    right, other_spec = pytree.tree_flatten(other)
    return spec == other_spec and all(_leaves_near(*pair, bound) for pair in zip(left, right, strict=True))


def _leaves_near(one: Any, other: Any, bound: float) -> bool:
    if isinstance(one, Tensor | float) and type(one) is type(other):
        left, right = torch.as_tensor(one), torch.as_tensor(other)
        return left.shape == right.shape and bool((left - right).abs().le(bound * right.abs().max()).all())
    return bool(one == other)


def _bits(value: Any) -> list[Any]:
    """What crosses to the test, and is equal only if each bit is."""
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(value)]


def resumed(folder: str, model: str) -> list[Any]:
    """Lanczos that ends early, goes on, fails on one rank, goes on: as one that does not, to the bit; and refusals."""
    size, path = dist.get_world_size(), Path(folder) / "run.pt"
    network = model_of(model, size)
    pipe, loss_fn = over_ranks(network, even(len(network), size), 3, timeout=20.0), BreakingLoss()
    A = Hessian(pipe, data_of([6]), loss_fn, seed=11)
    whole = top_eigenpairs(A, 3)
    begun = top_eigenpairs(A, 3, max_products=9, resume=path)
    A.space.norm(A.space.zeros())  # all have come so far
    steps = [_step_of(path)]
    files = sorted(each.name for each in Path(folder).iterdir())
    BreakingLoss.countdown = 9 if A.space.rank == size - 1 else 0
    failed = told(lambda: top_eigenpairs(A, 3, resume=path))
    BreakingLoss.countdown = 0
    steps.append(_step_of(path))
    values = [parameter.detach().clone() for parameter in pipe.parameters()]
    if A.space.rank == 0:
        next(pipe.parameters()).data.add_(1.0)
    refused = told(lambda: top_eigenpairs(A, 3, resume=path))
    for parameter, value in zip(pipe.parameters(), values, strict=True):
        parameter.data.copy_(value)
    after = top_eigenpairs(A, 3, resume=path)
    same = torch.equal(after.values, whole.values) and after.products == whole.products and all(
        torch.equal(one[name], other[name])
        for one, other in zip(after.vectors, whole.vectors, strict=True)
        for name in one
    )
    A.space.norm(A.space.zeros())
    left = [each.name for each in Path(folder).iterdir()]
    return [begun.converged, files, steps, failed, refused, same, left]


def _step_of(path: Path) -> int:
    """How many products the state has seen that this rank would go on from."""
    file = file_of_rank(path, dist.get_rank(), dist.get_world_size())
    step: int = torch.load(file, weights_only=True)["step"]
    return step


# ------------------------------------------------------------------------------------------------------------ failures


class Breaking(nn.Module):
    """A layer that raises in its forward, or as the last gradient that is `left` to its output comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.breaks, self.left = False, outside([0])

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            raise ValueError("this forward breaks")
        output: Tensor = self.layer(x).tanh()
        if output.requires_grad:
            output.register_hook(self._count)
        return output

    def _count(self, grad: Tensor) -> None:
        self.left()[0] -= 1
        if self.left()[0] == 0:
            raise ZeroDivisionError("this backward breaks")


class BreakingLoss:
    """`curved`, which raises the `countdown`-th time."""

    countdown = 0  # of the class: an attribute of the object would be a setting of the loss

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        BreakingLoss.countdown -= 1
        if self.countdown == 0:
            raise KeyError("no such loss")
        return curved(output, target)


def breaking_pipe(make: Make = over_ranks, **settings: Any) -> Pipe:
    torch.manual_seed(5)
    model = nn.Sequential(*[Breaking() for _ in range(4)]).double()
    return make(model, even(4, dist.get_world_size()), 3, schedule="gpipe", **settings)


def right(A: Operator, pipe: Pipe) -> bool:
    """Whether a product is that of one process."""
    alone = breaking_pipe(in_one_process)
    B = type(A)(alone, data_of([6]), curved)
    ours = by_all_names(pipe, A @ drawn(pipe, A.space.slots, 0), "")
    return bool(ours) and not differences(ours, by_all_names(alone, B @ drawn(alone, B.space.slots, 0), ""))


def broken(cases: list[tuple[int, str, int, str]]) -> list[tuple[Told, bool]]:
    """For each (rank, what raises there, when, matrix): what this rank is told; whether the next product is right.

    The ranks go on together: gloo may wake a rank whose send met the other's closing only when its time is over.
    """
    pipe, loss_fn = breaking_pipe(timeout=10.0), BreakingLoss()
    found = []
    for where, what, countdown, matrix in cases:
        A = MATRICES[matrix](pipe, data_of([6]), loss_fn, seed=11)
        vector = drawn(pipe, A.space.slots, 0)
        layer = [each for each in pipe if isinstance(each, Breaking)][-1]
        if dist.get_rank() == where:
            layer.breaks = what == "forward"
            layer.left()[0] = countdown if what == "backward" else 0
            BreakingLoss.countdown = countdown if what == "loss" else 0
        with Untouched(pipe):
            error = told(lambda: A @ vector)
        layer.breaks, layer.left()[0], BreakingLoss.countdown = False, 0, 0
        dist.barrier()
        found.append((error, right(A, pipe)))
    return found


Script = Callable[[Pipe, bool], object]


def apart(cases: list[tuple[str, int]]) -> list[tuple[Told, bool]]:
    """For each (what, rank): one rank does something else than the others, in the first calls of a Pipe or the second
    time at the latest. What this rank is told; whether a product is right after it."""
    found = []
    for which, odd in cases:
        pipe = breaking_pipe(timeout=20.0)

        def twice(pipe: Pipe = pipe, script: Script = APART[which], is_odd: bool = dist.get_rank() == odd) -> None:
            script(pipe, is_odd)
            script(pipe, is_odd)

        error = told(twice)
        found.append((error, right(Hessian(pipe, data_of([6]), curved, seed=11), pipe)))
    return found


def _products(
    pipe: Pipe, counts: Iterable[int] = (6,), vectors: int = 1, matrix: str = "H", data: Data | None = None,
    **settings: Any,
) -> object:
    A = MATRICES[matrix](pipe, data or data_of(counts), curved, seed=11, **settings)
    return A @ [drawn(pipe, A.space.slots, number) for number in range(vectors)]


def _with_chunks(pipe: Pipe, odd: bool) -> object:
    pipe.chunks = 2 if odd else 3
    try:
        return _products(pipe)
    finally:
        pipe.chunks = 3


def _alone(pipe: Pipe, odd: bool, instead: Callable[[Operator], object]) -> object:
    """`if rank == 0: A @ v`, and the others go on."""
    A = Hessian(pipe, data_of([6]), curved, seed=11)
    return A @ drawn(pipe, A.space.slots, 0) if odd else instead(A)


def _without_a_part(pipe: Pipe, odd: bool) -> object:
    A = Hessian(pipe, data_of([6]), curved, seed=11)
    vector = drawn(pipe, A.space.slots, 0)
    if odd:
        vector.popitem()
    return A @ vector


def _changed(pipe: Pipe, odd: bool) -> object:
    data = data_of([6])
    A = Hessian(pipe, data, curved, seed=11)
    vector = drawn(pipe, A.space.slots, 0)
    A @ vector
    if odd:
        data[0][0].add_(1.0)
    return A @ vector


def in_any_order(make: Make) -> Found:
    """A product by parameters that each process names in an order of its own, as a set of names comes."""
    pipe = make(model_of("layered", 2), even(len(model_of("layered", 2)), 2), 2)
    params = ["0.weight", "0.bias", "1"][:: 1 - 2 * (dist.is_initialized() and dist.get_rank() == 1)]
    A = MATRICES["H"](pipe, data_of([6]), LOSSES["curved"], params=params, seed=11)
    return by_all_names(pipe, A @ drawn(pipe, A.space.slots, 0), "product")


def _frozen(pipe: Pipe, odd: bool) -> object:
    """A layer that one rank has is frozen."""
    layer = list(pipe)[0]
    layer.requires_grad_(False)
    try:
        return _products(pipe, params="0")
    finally:
        layer.requires_grad_(True)


APART: dict[str, Script] = {
    "values": lambda pipe, odd: _products(pipe, data=[(rows(6, seed=1 + odd), rows(6))]),
    "rows": lambda pipe, odd: _products(pipe, [6 + odd]),
    "mini-batches": lambda pipe, odd: _products(pipe, [6] * (2 + odd)),
    "chunks": _with_chunks,
    "matrix": lambda pipe, odd: _products(pipe, matrix="G" if odd else "H"),
    "training": lambda pipe, odd: _products(pipe, training=odd),
    "params": lambda pipe, odd: _products(pipe, params="0" if odd else None),
    "reduction": lambda pipe, odd: _products(pipe, loss_reduction="sum" if odd else "mean"),
    "vectors": lambda pipe, odd: _products(pipe, vectors=1 + odd),
    "blocks": lambda pipe, odd: _products(pipe, vectors=8 if odd else 4),
    "dots": lambda pipe, odd: _alone(pipe, odd, lambda A: A.space.norm(A.space.zeros())),
    "step": lambda pipe, odd: _alone(pipe, odd, lambda A: pipe.step(rows(6), rows(6), loss_fn=square)),
    "gradient": lambda pipe, odd: _alone(pipe, odd, lambda A: A.gradient()),
    "seeds": lambda pipe, odd: Hessian(pipe, data_of([6]), curved, seed=11).trace(2, seed=int(odd)),
    "damping": lambda pipe, odd: Hessian(pipe, data_of([6]), curved, seed=11).inverse(9.0 + odd).products([]),
    "a part": _without_a_part,
    "changed": _changed,
    "frozen": _frozen,
}


def absent() -> Told:
    """A product on rank 0 only, and the others do nothing."""
    pipe = breaking_pipe(timeout=2.0)
    A = Hessian(pipe, data_of([6]), curved, seed=11)
    return told(lambda: A @ drawn(pipe, A.space.slots, 0)) if dist.get_rank() == 0 else ("", "", [], 0.0)


def unequal_ties(model: str) -> tuple[list[Told], bool]:
    """A vector whose entries for a tied parameter are others on the last rank; what A @ v, A.hvp and solve say."""
    pipe, A = operator_of(over_ranks, model, dist.get_world_size())
    vector = drawn(pipe, A.space.slots, 0)
    if dist.get_rank() == dist.get_world_size() - 1:
        for name, part in vector.items():
            part[0] += float(name.endswith(".weight") and part.shape == (4, 4))
    found = [told(lambda: A @ vector), told(lambda: A @ [vector, vector]), told(lambda: A.hvp(vector))]
    found.append(told(lambda: solve(A, vector, damping=9.0)))
    alone, B = operator_of(in_one_process, model, dist.get_world_size())
    ours = by_all_names(pipe, A @ drawn(pipe, A.space.slots, 0), "")
    return found, not differences(ours, by_all_names(alone, B @ drawn(alone, B.space.slots, 0), ""))


def flat() -> list[Told]:
    pipe, A = operator_of(over_ranks, "layered", dist.get_world_size())
    return [told(lambda: A @ torch.ones(shape, dtype=torch.float64)) for shape in ([A.shape[0]], [A.shape[0], 2])]


def own_module() -> tuple[float, float]:
    """A plain module is each rank's own: its trace, which is another one on each rank, and as it is written out."""
    rank = dist.get_rank()
    model = dropping(1)[: 2 * rank + 4]
    data = data_of([5 + rank])
    A = Hessian(model, data, curved, seed=rank)
    products = A @ torch.eye(A.shape[0], dtype=torch.float64)
    entries, _ = dense(model, "H", curved, data, list(A.space.slots))
    assert torch.allclose(products, entries, rtol=0.0, atol=1e-12 * float(entries.abs().max()))
    return trace(A, A.shape[0]).value, float(entries.trace())


def generators() -> tuple[list[float], int]:
    """Ranks whose generators are at the same place are so after an operator has drawn its seed."""
    pipe = breaking_pipe()
    torch.manual_seed(SEED)
    A = Hessian(pipe, data_of([6]), curved)
    return torch.randn(3).tolist(), A.seed
