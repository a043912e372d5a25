"""Laws: a check finds every product that is not a second derivative, says where, and passes those that are."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian, Report
from pipeline.curvature.products.finite_differences import Precision

MATRICES = (Hessian, GaussNewton, EmpiricalFisher)


class Forgetful(torch.autograd.Function):
    """exp, whose backward keeps a tensor where autograd does not see that it depends on x."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.exp()
        return ctx.kept * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.kept


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def network(dtype=torch.float64, at=None, layer=None) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    if at is not None:
        layers[at] = layer
    return nn.Sequential(*layers).to(dtype)


def data(dtype=torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(9, 4, dtype=dtype), torch.randint(3, (9,))


def operator(matrix=Hessian, model=None, dtype=torch.float64, **options):
    pipe = Pipe(network(dtype) if model is None else model, [2, 2, 2], 2, devices=["cpu"] * 3, mixes_rows=True)
    return matrix(pipe, data(dtype), functional.cross_entropy, **options)


def wrong(report: Report) -> list[str]:
    rows = zip(report.what, report.errors, report.limits, strict=True)
    return [what for what, error, most in rows if not error <= most]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("matrix", MATRICES)
def test_all_is_well_where_autograd_is_right(matrix, dtype) -> None:
    report = operator(matrix, dtype=dtype).check()
    assert report.ok and wrong(report) == []
    assert sum("finite differences of stage" in what for what in report.what) == 3
    assert ("finite differences of the gradient" in report.what) is (matrix is Hessian)
    assert "all is well" in str(report)


def test_a_check_does_not_care_about_inference_mode_around_it() -> None:
    checked = operator()
    with torch.inference_mode():
        assert checked.check().ok


@pytest.mark.parametrize("training", [True, False])
def test_dropout_and_kinks_are_no_fault(training: bool) -> None:
    model = network(at=1, layer=nn.ReLU())
    model[4] = nn.Dropout(0.3)
    assert operator(model=model, training=training).check().ok


class Norm(nn.Module):
    """A norm that computes in another type, as those of language models do."""

    def __init__(self, inner: torch.dtype) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.inner)
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Remembers(torch.autograd.Function):
    """A Swish whose second derivative is right."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.sigmoid() + x * x.sigmoid() * (1 - x.sigmoid()))


@pytest.mark.parametrize("inner", [torch.float64, torch.float32])
@pytest.mark.parametrize("matrix", [Hessian, GaussNewton])
def test_limits_go_by_the_least_precise_type_of_a_stage(matrix, inner) -> None:
    model = network(at=2, layer=Norm(inner))
    model[4] = Layer(Remembers.apply)
    op = operator(matrix, model)
    op @ torch.ones(op.shape[0], dtype=torch.float64)  # the Function is compared, and confirmed
    report = op.check()
    assert report.ok, report
    limits = dict(zip(report.what, report.limits, strict=True))
    assert limits["finite differences of stage 0 (layers 0..1)"] == 1e-4
    assert limits["finite differences of stage 1 (layers 2..3)"] == (1e-4 if inner is torch.float64 else 2e-2)
    assert limits["symmetric: u . H v = v . H u"] == (1e-10 if inner is torch.float64 else 1e-3)


class WithIndex(torch.autograd.Function):
    """It returns whole numbers, and nothing, beside its values."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        return index, x.sin(), None

    @staticmethod
    def backward(ctx, _, grad, __):
        return grad * ctx.saved_tensors[0].cos()


def test_what_is_returned_beside_values_is_not_of_less_precision() -> None:
    report = operator(model=network(at=1, layer=Layer(lambda x: WithIndex.apply(x)[1]))).check()
    assert report.ok and set(report.limits) == {0.0, 1e-10, 1e-4}


@pytest.mark.parametrize("inner", [torch.float64, torch.float32])
def test_a_wrong_derivative_is_found_beside_a_norm_of_less_precision(inner) -> None:
    model = network(at=2, layer=nn.Sequential(Norm(inner), Layer(Forgetful.apply)))
    assert "finite differences of stage 1 (layers 2..3)" in wrong(operator(model=model, verify=False).check())
    op = operator(model=model)
    with pytest.raises(ValueError, match=r"stage 1 \(layers 2..3\) has an autograd.Function of its own, and its"):
        op @ torch.ones(op.shape[0], dtype=torch.float64)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_in_half_precision_gross_errors_show(is_wrong: bool) -> None:
    layer = nn.Sequential(nn.Linear(6, 6), Layer(lambda x: x.detach() * x if is_wrong else x * x))
    op = operator(model=network(at=3, layer=layer).float(), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        report = op.check()
    assert report.ok is not is_wrong, report
    assert "computed in half precision: for a sharper answer check it in float32, without autocast" in report.notes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_of_a_loss_of_nearly_0_float32_says_that_float64_decides(dtype: torch.dtype) -> None:
    def fitted(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output + 12 * functional.one_hot(target, 3), target)

    report = Hessian(Pipe(network(dtype), [2, 2, 2], 2), data(dtype), fitted).check()
    said = [note for note in report.notes if "computed in float32" in note]
    assert report.ok is (dtype is torch.float64) and len(said) == (not report.ok)


@pytest.mark.parametrize(("at", "stage"), [(1, "stage 0 (layers 0..1)"), (4, "stage 2 (layers 4..5)")])
def test_a_wrong_derivative_is_found_and_the_stage_is_named(at: int, stage: str) -> None:
    report = operator(model=network(at=at, layer=Layer(Forgetful.apply)), verify=False).check()
    assert not report.ok and "SOMETHING IS WRONG" in str(report)
    assert [what for what in wrong(report) if "stage" in what] == [f"finite differences of {stage}"]
    assert "finite differences of the gradient" in wrong(report)
    assert "double backward through the whole model" not in wrong(report)  # autograd says the same: it is not ours


class CubeOfImaginary(torch.autograd.Function):
    """The cube of an imaginary part. Of numbers that are complex its gradient, too, is imaginary."""

    @staticmethod
    def forward(ctx, z, keeps):
        ctx.kept = z.imag.detach().clone()
        ctx.keeps = keeps
        ctx.save_for_backward(z)
        return z.imag**3

    @staticmethod
    def backward(ctx, grad):
        z = ctx.kept if ctx.keeps else ctx.saved_tensors[0].imag
        return torch.complex(torch.zeros_like(grad), 3 * grad * z**2), None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("place", ["stage 1", "loss_fn"])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_wrong_derivative_by_an_imaginary_part_is_found(is_wrong: bool, place: str) -> None:
    torch.manual_seed(0)
    cube = Layer(lambda z: CubeOfImaginary.apply(z, is_wrong))
    layers = [nn.Linear(4, 6), Layer(lambda x: torch.complex(x, x.sin()))]
    is_layer = place == "stage 1"
    model = nn.Sequential(*layers, *[cube, nn.Linear(6, 2)] * is_layer).double()
    pipe = Pipe(model, [2, 2] if is_layer else [2], 2)

    def loss_fn(output: Tensor, _: None) -> Tensor:
        return (output if is_layer else cube(output)).sum(1).square().mean()

    report = Hessian(pipe, (data()[0], None), loss_fn, verify=False).check()
    assert len([what for what in wrong(report) if place in what]) == is_wrong
    op = Hessian(pipe, (data()[0], None), loss_fn)
    if is_wrong:
        with pytest.raises(ValueError, match=f"{place}.* has an autograd.Function of its own, and its second"):
            op.trace(1)
    else:
        op.trace(1)


@pytest.mark.parametrize("matrix", [Hessian, GaussNewton])
def test_a_wrong_derivative_of_the_loss_is_found_and_named(matrix) -> None:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return Forgetful.apply(out).mean()  # type: ignore[no-any-return, no-untyped-call]

    report = matrix(Pipe(network(), [2, 2, 2], 2), data(), loss, verify=False).check()
    assert not report.ok and "finite differences of loss_fn" in wrong(report)
    assert "finite differences of loss_fn" in operator(matrix).check().what


def test_randomness_that_no_seed_reaches_is_found() -> None:
    counter = itertools.count()
    odd = Layer(lambda x: x * (1.0 + 1e-3 * (next(counter) // 2)))  # the last stage: one forward for each chunk
    assert "the same product again" in wrong(operator(model=network(at=4, layer=odd)).check())


@pytest.mark.parametrize("matrix", MATRICES)
def test_what_is_no_symmetric_matrix_is_found(matrix, monkeypatch) -> None:
    op = operator(matrix)
    rows = torch.arange(op.shape[0]).double()
    products = type(op).products
    monkeypatch.setattr(
        type(op), "products", lambda self, vecs: [[part * rows for part in vec] for vec in products(self, vecs)]
    )
    found = wrong(op.check())
    assert "symmetric: u . H v = v . H u" in found and "linear: H (2 u - 3 v)" not in found


def test_what_is_not_linear_is_found(monkeypatch) -> None:
    products = Hessian.products
    monkeypatch.setattr(
        Hessian, "products", lambda self, vecs: [[part + 1e-3 for part in vec] for vec in products(self, vecs)]
    )
    assert "linear: H (2 u - 3 v)" in wrong(operator().check())


def test_a_product_that_is_not_finite_is_found() -> None:
    report = operator(model=network(at=1, layer=Layer(lambda x: x * float("nan")))).check()
    assert not report.ok and "linear: H (2 u - 3 v)" in wrong(report)


def test_what_cannot_be_looked_at_is_said() -> None:
    weight = nn.Parameter(torch.randn(6, 6).double())

    class Captures(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = [weight]

        def forward(self, x):
            return x @ self.held[0]

    model = network(at=1, layer=Captures())
    model[5].register_parameter("late", weight)  # a parameter of the model, which a layer before has in a list
    report = operator(model=model).check()
    assert report.ok
    assert any("a parameter in a list" in note for note in report.notes)


@pytest.mark.probes
@pytest.mark.parametrize("at", [0, 1])
def test_statistics_of_data_are_refused_where_no_graph_shows_them(at: int) -> None:
    def normed(x: Tensor) -> Tensor:
        return functional.batch_norm(x, None, None, training=True)

    layers = [nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)]
    layers[0] = nn.Sequential(Layer(normed), layers[0]) if at == 0 else layers[0]
    layers[1] = nn.Sequential(Layer(lambda x: normed(x.detach()) + x), layers[1]) if at == 1 else layers[1]
    model = nn.Sequential(*layers).double()
    pipe = Pipe(model, [1, 1, 1], 3, devices=["cpu"] * 3)
    op = Hessian(pipe, data(), functional.cross_entropy)
    with pytest.raises(ValueError, match=f"layer {at} .*mixes the rows of the mini-batch"):
        op.gradient()
    pipe.chunks = 1
    assert op.gradient() and (at == 1 or op.check().ok)  # where something is detached, differences see what it was of


@pytest.mark.probes
@pytest.mark.parametrize("settings", [{"batch_dim": 1}, {"mixes_rows": True}], ids=str)
def test_a_check_of_the_whole_model_keeps_what_the_pipe_says_of_rows(settings) -> None:
    layer = Layer(lambda x: x - x.mean(0))
    model = nn.Sequential(nn.Linear(4, 6), layer, nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(5, 6, 4).double(), torch.randn(5, 6, 3).double()
    assert Hessian(Pipe(model, [2, 2], 2, **settings), (x, y), functional.mse_loss).check().ok


def test_a_compiled_batch_norm_that_sees_chunks_is_refused() -> None:
    norm = torch.jit.script(nn.Sequential(nn.BatchNorm1d(6), nn.Tanh()))
    pipe = Pipe(nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 3)).double(), [1, 2], 3, devices=["cpu"] * 2)
    with pytest.raises(ValueError, match=r"'1.0' \(BatchNorm1d\) normalises with the statistics of the rows"):
        Hessian(pipe, data(), functional.cross_entropy, training=True).gradient()
    assert Hessian(pipe, data(), functional.cross_entropy, training=False).gradient()


def test_instance_norm_is_no_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), Layer(functional.instance_norm), nn.Flatten(),
                          nn.Tanh(), nn.Linear(8, 3)).double()
    assert operator(model=model).check().ok


def test_what_is_worked_round_is_said() -> None:
    model = network(at=1, layer=nn.Hardsigmoid())
    nn.utils.parametrizations.weight_norm(model[3])
    op = operator(model=model)
    report = op.check()
    assert report.ok and len(op.workarounds) == 2
    assert "worked round: '1': Hardsigmoid is written out" in str(report)
    assert "worked round: '3.parametrizations.weight.0': weight_norm is written out" in str(report)
    assert operator().workarounds == []
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).double()
    named = Hessian(nn.Sequential(layer), (torch.randn(3, 5, 4).double(), None), lambda y, _: y.square().mean())
    assert any("math kernel" in what for what in named.workarounds) and named.check().ok


def test_an_error_that_is_no_number_is_not_lost_behind_another(monkeypatch) -> None:
    def compare(self, vectors, on_result) -> None:
        for error in (float("nan"), 0.0):
            on_result(0, error, Precision.of([torch.float64]))

    op = operator()
    assert op.check().ok
    monkeypatch.setattr(type(op), "compare_stages", compare)
    assert not op.check().ok


def test_a_report_is_saved_and_loaded(tmp_path) -> None:
    report = operator().check()
    report.save(tmp_path / "check.json")
    assert str(Report.load(tmp_path / "check.json")) == str(report)


def dense(op) -> Tensor:
    return op @ torch.eye(op.shape[0], dtype=torch.float64)


@pytest.mark.parametrize("matrix", [MATRICES[0], *[pytest.param(m, marks=pytest.mark.soak) for m in MATRICES[1:]]])
def test_spectra_of_layers_are_those_of_the_diagonal_blocks(matrix) -> None:
    op = operator(matrix)
    found = op.per_layer(2, samples=op.shape[0], tol=1e-8)
    whole, first = dense(op), 0
    sizes = {"0": 30, "2": 12, "3": 42, "5": 21}
    assert found.names == list(sizes) and found.sizes == list(sizes.values())
    for row, size in enumerate(sizes.values()):
        values = torch.linalg.eigvalsh(whole[first : first + size, first : first + size])
        by_size = values[values.abs().argsort(descending=True)][:2]
        torch.testing.assert_close(found.values[row], by_size, rtol=1e-6, atol=1e-9)
        assert float(found.traces[row]) == pytest.approx(float(values.sum()), rel=1e-8)
        first += size


def test_a_restricted_operator_is_the_block_and_leaves_the_whole_as_it_is() -> None:
    op = operator()
    whole = dense(op)
    block = op.restricted({"3.weight", "5.bias"})
    names = [name for name, parameter in network().named_parameters() for _ in range(parameter.numel())]
    chosen = [place for place, name in enumerate(names) if name in ("3.weight", "5.bias")]
    torch.testing.assert_close(dense(block), whole[chosen][:, chosen], rtol=1e-10, atol=1e-14)
    assert torch.equal(dense(op), whole)


def test_a_restricted_operator_takes_the_names_that_params_takes() -> None:
    op = operator()
    assert list(op.restricted("3.weight").space.slots) == ["3.weight"]
    assert list(op.restricted(["5", "3.bias"]).space.slots) == ["3.bias", "5.weight", "5.bias"]
    for names, error, words in ((3, TypeError, "params is 3. Give names of layers or parameters"),
                                ("13.weight", ValueError, "params has '13.weight', which is no parameter or layer"),
                                (["0", "x"], ValueError, "params has 'x', which is no parameter or layer")):
        with pytest.raises(error, match=words):
            op.restricted(names)  # type: ignore[arg-type]


class Rounded(torch.autograd.Function):
    """Numbers rounded to thirds, by whose gradient they pass through."""

    @staticmethod
    def forward(ctx, x):
        return (3 * x).round() / 3

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("matrix, order", [(Hessian, "second "), (GaussNewton, ""), (EmpiricalFisher, "")])
def test_a_straight_through_estimator_is_refused_by_the_derivative_that_is_taken(matrix, order) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Layer(Rounded.apply), nn.Linear(4, 3)).double()
    op = matrix(model, data(), functional.cross_entropy)
    with pytest.raises(ValueError, match=rf"own, and its {order}derivative differs .*\(a straight-through estimator"):
        op.trace(1)
