"""Every operator of torch that has a derivative, by torch's own list of them with inputs for each.

In a stage it must have the plain module's gradients. Where forward mode is believed its tangents must be those of the
adjoint, at ordinary inputs and where derivatives jump: zeros, ties, singular matrices. Its second derivative must be
that of finite differences, by any of its inputs, or products must refuse it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from law_models import Apply, normal
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pipeline import Pipe
from pipeline.curvature.known_bad import refuse_nodes
from pipeline.curvature.products.forward_mode import ConstantsWithoutGrad, is_sound

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]
PARTS = 24  # of the list, a test each
SMALL = 3000  # numbers in an operator's inputs; others are left out
LARGE = 1e100  # a number; with larger ones derivatives overflow
SPECIAL = {  # inputs in place of the operator's own
    "itself": lambda x: x,
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "equal": lambda x: torch.full_like(x, x.flatten()[0].item() if x.numel() else 0),
    "rounded": torch.round,
    "signs": lambda x: torch.arange(x.numel()).sub(1).remainder(3).sub(1).view(x.shape).to(x),
    "bits": lambda x: torch.arange(x.numel()).remainder(2).view(x.shape).to(x),
}
UNDEFINED = ("svd", "pca_lowrank", "pinv", "eig", "polar")  # where singular values are equal: ordinary inputs alone
BETWEEN_TYPES = ("bfloat16", "half", "float", "chalf", "cfloat")  # conversions, which round


class Operator(NamedTuple):
    """One operator with one of its inputs.

    Attributes:
        function: it, or the same by another name.
        inputs: the tensors that it is differentiated by.
        place: puts others in the place of these, and gives the arguments.
        process: from what it returns to the part that is differentiated.
    """

    function: Any
    inputs: list[Tensor]
    place: Any
    process: Any

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Its outputs that depend on the inputs. It gets views, as it may write."""
        argument, args, kwargs = self.place([tensor.view_as(tensor) for tensor in inputs])
        outputs = tree_leaves(self.process(self.function(argument, *args, **kwargs)))
        return [out for out in outputs if isinstance(out, Tensor) and out.dtype == torch.float64 and out.requires_grad]

    @property
    def draws(self) -> bool:
        outputs = []
        for seed in range(2):
            torch.manual_seed(seed)
            outputs.append([out.detach() for out in self([tensor.clone().requires_grad_() for tensor in self.inputs])])
        return any(not torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def operators(part: int, samples: int) -> Iterator[tuple[str, Operator]]:
    """The operators of one part of the list, each with its first samples."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db[part::PARTS]:
        if info.supports_autograd and torch.float64 in info.dtypes:
            torch.manual_seed(0)
            for number, sample in enumerate(info.sample_inputs("cpu", torch.float64)):
                leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
                places = [i for i, leaf in enumerate(leaves) if _is_input(leaf)]
                inputs = [leaves[i].detach().clone() for i in places]
                is_small = sum(tensor.numel() for tensor in inputs) <= SMALL
                if number < samples and inputs and is_small and not any((x.abs() > LARGE).any() for x in inputs):
                    place = _placer(leaves, spec, places)
                    name = f"{info.formatted_name}, sample {number}"
                    yield name, Operator(info.op, inputs, place, sample.output_process_fn_grad)


def _is_input(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float64 and leaf.layout is torch.strided


def _placer(leaves: list[Any], spec: Any, places: list[int]) -> Any:
    def place(tensors: list[Tensor]) -> Any:
        present = dict(zip(places, tensors, strict=True))
        return tree_unflatten([present.get(i, leaf) for i, leaf in enumerate(leaves)], spec)

    return place


def random_like(tensor: Tensor, seed: int = 1) -> Tensor:
    return normal(tensor.numel(), seed=seed).view(tensor.shape)


# ------------------------------------------------------------------------------------------------------------ tangents


def adjoints(operator: Operator, inputs: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
    """The tangents of the outputs, by the adjoint of the adjoint; NaN where the outputs are no numbers."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    roots = operator(leaves)
    seeds = [torch.zeros_like(root, requires_grad=True) for root in roots]
    grads = torch.autograd.grad(roots, leaves, seeds, create_graph=True, allow_unused=True)
    live = [pair for pair in zip(grads, directions, strict=True) if pair[0] is not None and pair[0].requires_grad]
    outs, along = zip(*live, strict=True)
    tangents = torch.autograd.grad(outs, seeds, along, allow_unused=True)
    pairs = zip(tangents, [root.detach() for root in roots], strict=True)
    return [root - root + (0.0 if tangent is None else tangent) for tangent, root in pairs]


def believed(operator: Operator, inputs: list[Tensor], directions: list[Tensor]) -> list[Tensor] | None:
    """The same by forward mode, as a product computes them; None: they are not believed."""
    constants = ConstantsWithoutGrad()
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(leaf, part) for leaf, part in zip(leaves, directions, strict=True)]
        with constants:
            roots = operator(duals)
        if constants.differs or not is_sound(roots):
            return None
        tangents = [forward_ad.unpack_dual(root).tangent for root in roots]
        return [torch.zeros_like(r) if t is None else t.detach() for t, r in zip(tangents, roots, strict=True)]


@pytest.mark.parametrize("part", range(PARTS))
def test_where_forward_mode_is_believed_its_tangents_are_the_adjoints(part):
    wrong, compared = [], 0
    for name, operator in operators(part, 40):
        for kind, special in SPECIAL.items():
            if kind != "itself" and any(undefined in name for undefined in UNDEFINED):
                continue
            inputs = [special(tensor) for tensor in operator.inputs]
            directions = [random_like(tensor, seed=7 + i) for i, tensor in enumerate(inputs)]
            try:
                torch.manual_seed(0)
                wanted = adjoints(operator, inputs, directions)
                torch.manual_seed(0)
                tangents = believed(operator, inputs, directions)
            except (RuntimeError, NotImplementedError, ValueError):  # no such derivative, or not at these inputs
                continue
            compared += 1
            for tangent, expected in zip(tangents or (), wanted if tangents else (), strict=True):
                defined = expected.isfinite()  # infinities and what comes of them may be either
                if not torch.allclose(tangent[defined], expected[defined], rtol=1e-6, atol=1e-6):
                    wrong.append(f"{name}, {kind}: {tangent.flatten()[:4]}, expected {expected.flatten()[:4]}")
    assert not wrong, "\n".join(wrong)
    assert compared > 300


# -------------------------------------------------------------------------------------------------- second derivatives

NO_FUNCTIONS = (  # they give no gradient of a function, or none by labels, or ignore a part of the direction
    "as_strided_scatter", "cholesky", "eigh", "eigvalsh", "pinv_hermitian", "hinge_embedding", "cosine_embedding",
    "max_unpool", "subgradients_at_zero", "functional_embedding", "matrix_sqrth",
)  # fmt: skip


def error_by(operator: Operator, places: tuple[int, ...]) -> float | None:
    """The distance of the second derivative by some of the inputs from that of finite differences, along a direction.

    None: it is refused, checked by numbers, or not defined. Longer steps may go over a kink, shorter ones are rounded.
    """
    directions = {i: random_like(operator.inputs[i], seed=7 + i) for i in places}

    def gradient(step: float) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        moved = {i: (operator.inputs[i] + step * part).requires_grad_() for i, part in directions.items()}
        torch.manual_seed(0)
        roots = operator([moved.get(i, tensor.clone()) for i, tensor in enumerate(operator.inputs)])
        loss = sum((random_like(root) * root).sum() + 0.15 * root.square().sum() for root in roots)
        loss = loss + sum(tensor.sum() for tensor in moved.values())  # it depends on them, if on nothing else
        grads = torch.autograd.grad(loss, list(moved.values()), create_graph=step == 0.0, allow_unused=True)
        pairs = zip(grads, moved.values(), strict=True)
        return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs], list(moved.values()), roots

    grads, leaves, roots = gradient(0.0)
    if refuse_nodes("it", roots):
        return None
    pairs = [(grad, part) for grad, part in zip(grads, directions.values(), strict=True) if grad.requires_grad]
    outs, along = zip(*pairs, strict=True) if pairs else ((), ())
    second = torch.autograd.grad(outs, leaves, along, allow_unused=True) if pairs else [None] * len(leaves)
    found = [torch.zeros_like(leaf) if part is None else part for part, leaf in zip(second, leaves, strict=True)]
    errors = []
    for step in 1e-4, 1e-5, 1e-6:
        (above, *_), (below, *_) = gradient(step), gradient(-step)
        differences = [(one - other) / (2 * step) for one, other in zip(above, below, strict=True)]
        if not all(tensor.isfinite().all() for tensor in (*grads, *differences)):
            return None
        expected, product = joined(differences), joined(found)
        errors.append(float((product - expected).norm() / (expected.norm() + 1e-5 * joined(above).norm() + 1e-2)))
    return min(errors)


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.mark.parametrize("part", range(PARTS))
def test_a_second_derivative_is_that_of_finite_differences_or_refused(part):
    wrong, compared = [], 0
    for name, operator in operators(part, 25):
        every = range(len(operator.inputs))
        all_but_one = {tuple(i for i in every if i != left_out) for left_out in every}
        for places in sorted({tuple(every), *[(i,) for i in every], *all_but_one} - {()}):
            try:
                error = error_by(operator, places) if not any(none in name for none in NO_FUNCTIONS) else None
            except (RuntimeError, NotImplementedError, ValueError):  # it has none, or is refused
                continue
            compared += error is not None
            if error is not None and error > 1e-3:
                wrong.append(f"{name} by {places}: {error:.1e}")
    assert not wrong, "\n".join(wrong)
    assert compared > 100


# -------------------------------------------------------------------------------------------------------- in a stage


class Within(nn.Module):
    """x times a number that an operator makes of parameters and of x."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator = operator
        self.inputs = nn.ParameterList([nn.Parameter(tensor) for tensor in operator.inputs])

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.operator([parameter + x.mean() * 1e-3 for parameter in self.inputs])
        return x * (1 + 0.01 * sum((out.square() + out).sum() / max(out.numel(), 1) for out in outputs))


def second(loss: Tensor, parameters: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of a function of the gradient."""
    grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    along = sum((grad * random_like(grad)).sum() for grad in grads if grad is not None and grad.requires_grad)
    return torch.autograd.grad(along, parameters, allow_unused=True)


@pytest.mark.parametrize("part", range(PARTS))
def test_in_a_stage_an_operator_has_the_plain_modules_gradients(part):
    """To the bit, in a backward of one half and of two, kept and recomputed; second derivatives to rounding."""
    x, y, compared = normal(4, 3), torch.zeros(4, 2).double(), 0
    for name, operator in operators(part, 3):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 3), Within(operator), Apply(torch.tanh), nn.Linear(3, 2)).double()
        parameters = list(model.parameters())
        try:
            if operator.draws:
                continue
            wanted = torch.autograd.grad(F.mse_loss(model(x), y), parameters, allow_unused=True)
        except (RuntimeError, NotImplementedError, ValueError):  # not for tensors that were computed
            continue
        if not all(grad is None or grad.isfinite().all() for grad in wanted):
            continue
        for mode, schedule in ("never", "1f1b"), ("always", "zb-h1"), ("never", "zb-h1"):
            pipe = Pipe(model, [1, 1, 2], 1, checkpoint=mode, schedule=schedule)
            for _ in range(3):
                grads = torch.autograd.grad(F.mse_loss(pipe(x), y), parameters, allow_unused=True)
                assert_same(grads, wanted, name, 0.0)
            model.zero_grad(set_to_none=True)
            pipe.step(x, y, loss_fn=F.mse_loss)
            assert_same([parameter.grad for parameter in parameters], wanted, name, 0.0)
            if mode == "always" and not any(kind in name for kind in BETWEEN_TYPES):
                try:
                    expected = second(F.mse_loss(model(x), y), parameters)
                except (RuntimeError, NotImplementedError):  # it has none
                    continue
                assert_same(second(F.mse_loss(pipe(x), y), parameters), expected, name, 1e-8)
        compared += 1
    assert compared > 15


def assert_same(grads, wanted, name, tolerance):
    pairs = [[torch.zeros(1) if each is None else each for each in pair] for pair in zip(grads, wanted, strict=True)]
    scale = max(float(expected.abs().nan_to_num().max()) for _, expected in pairs if expected.numel())
    for grad, expected in pairs:
        assert torch.allclose(grad, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True), name
