"""Every operator of torch that has a derivative, by torch's own list of them with inputs for each.

In a stage it must have the plain module's gradients, and where forward mode is believed its tangents must be those of
the adjoint, at ordinary inputs and where derivatives jump: zeros, ties, singular matrices.
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
from pipeline.curvature.products.forward_mode import ConstantsWithoutGrad, is_sound

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]
PARTS = 24  # of the list, a test each
SMALL = 3000  # numbers in an operator's inputs; others are left out
SPECIAL = {  # inputs in place of the operator's own
    "itself": lambda x: x,
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "equal": lambda x: torch.full_like(x, x.flatten()[0].item() if x.numel() else 0),
    "rounded": torch.round,
    "signs": lambda x: torch.arange(x.numel()).sub(1).remainder(3).sub(1).view(x.shape).to(x),
    "bits": lambda x: torch.arange(x.numel()).remainder(2).view(x.shape).to(x),
}
UNDEFINED = ("svd", "pca_lowrank", "pinv", "eig")  # derivatives where singular values are equal: ordinary inputs alone
BETWEEN_TYPES = ("bfloat16", "half", "float", "chalf", "cfloat")  # conversions, which round


class Operator(NamedTuple):
    """One operator with one of its inputs.

    Attributes:
        inputs: the tensors that it is differentiated by.
        place: puts others in the place of these, and gives the arguments.
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
                if number < samples and inputs and sum(tensor.numel() for tensor in inputs) <= SMALL:
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
                if not torch.allclose(tangent[defined], expected[defined], rtol=1e-6, atol=1e-8):
                    wrong.append(f"{name}, {kind}: {tangent.flatten()[:4]}, expected {expected.flatten()[:4]}")
    assert not wrong, "\n".join(wrong)
    assert compared > 300


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
