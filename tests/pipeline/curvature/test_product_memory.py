"""What does a product hold, to the tensor? One stage's graph of one chunk, and what is on its way between stages.

    u         the bytes of one activation of one chunk: rows / chunks x width x 8
    graph     of a stage of D pairs Linear-Tanh: its input, D outputs, and of the gradient's graph the gradients at the
              D outputs and at the D sums before them: (3 D + 1) u; of the first stage, whose input needs no gradient,
              the sum of its first layer is not needed: 3 D u
    messages  (h, h'[k]) from F of a stage until B of the next has ended, then (l, l'[k]) from that until B of the stage
              has begun: (1 + K) u each, for K vectors; how many there are at a time follows from the order that runs

Saved is what autograd packs (saved-tensor hooks). Alive is every storage that an operator has made in the product and
that is not freed yet (a dispatch mode): saved, messages, gradients, the product itself.
"""

import gc
import weakref
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from law_models import normal
from pipeline_probes import outside
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import Pipe
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian
from pipeline.execution.plan import plan_step
from scheduler import Kind, by_name

pytestmark = pytest.mark.inline
MATRICES = [Hessian, GaussNewton, EmpiricalFisher]
every_matrix = pytest.mark.parametrize("matrix", MATRICES)
SHAPES = [("gpipe", 1, 1), ("gpipe", 3, 4), ("1f1b", 3, 4), ("zb-h1", 4, 6)]
every_shape = pytest.mark.parametrize("schedule, stages, chunks", SHAPES)
DEPTH, WIDTH, ROWS = 3, 8, 64  # pairs in a stage; entries in a row; rows of a chunk
ACTIVATION = ROWS * WIDTH * 8
AROUND = 6  # activations that are there for a moment: a sum before its Tanh, what the backward hands on, the loss's


class Bytes:
    """Bytes of distinct storages, each for as long as one of its holders lives; some do not count."""

    def __init__(self, aside):
        self._aside = {tensor.untyped_storage().data_ptr() for tensor in aside}
        self._held = Counter()
        self.now = self.peak = 0

    def hold(self, storage, holder):
        key = storage.data_ptr(), storage.nbytes()
        if key[0] in self._aside or not key[1]:
            return
        self.now += key[1] * (not self._held[key])
        self._held[key] += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(holder, self._free, key)

    def _free(self, key):
        self._held[key] -= 1
        self.now -= key[1] * (not self._held[key])


class Holder:
    """What stands in autograd's graph for a saved tensor."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()


def saving(count):
    def pack(tensor):
        holder = Holder(tensor)
        count.hold(tensor.untyped_storage(), holder)
        return holder

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor)


class Living(TorchDispatchMode):
    def __init__(self, count):
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._count.hold(tensor.untyped_storage(), tensor.untyped_storage())
        return out


@pytest.fixture(scope="module", autouse=True)
def _small_heap():
    """What other tests have left is not looked at: each collection would take a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@contextmanager
def no_collector():
    """Within, what hangs in a cycle stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Net:
    """A Pipe of Linear-Tanh stages, with data."""

    def __init__(self, schedule, stages, chunks):
        torch.manual_seed(5)
        pairs = [layer for _ in range(stages * DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.model = nn.Sequential(*pairs).double()
        self.x, self.y = normal(chunks * ROWS, WIDTH), normal(chunks * ROWS, WIDTH, seed=2)
        self.pipe = Pipe(self.model, [2 * DEPTH] * stages, chunks, schedule=schedule, checkpoint="always")
        (self.order,) = plan_step(by_name(schedule, stages, chunks), ["cpu"] * stages).device_orders
        self.stages = stages

    @property
    def graph(self):
        """Activations in the largest stage's graph."""
        return 3 * DEPTH + (self.stages > 1)

    @property
    def parameters(self):
        """Their bytes."""
        return sum(parameter.numel() * 8 for parameter in self.model.parameters())

    def products(self, matrix, count):
        """What computes `count` products at once; four calls are done: the next three look at nothing more."""
        op = matrix(self.pipe, (self.x, self.y), functional.mse_loss)
        vectors = [op.space.random("normal", 0, number) for number in range(count)]
        for _ in range(4):
            op.products(vectors[:1])
        return lambda: op.products(vectors), [vector[0] for vector in vectors]

    def peak(self, kind, run, vectors=()):
        """The most bytes that are held at a time, and those that still are at the end, with what `run` gives."""
        with no_collector():
            count = Bytes([*self.model.parameters(), self.x, self.y, *vectors])
            with kind(count):
                found = run()
            left = count.now
        del found
        return count.peak, left

    def messages(self, count):
        """Activations on their way, during each action that computes."""
        alive, found = set(), []
        for stage, kind, chunk in self.order:
            if kind is Kind.W:  # of a backward cut in two the first part does all
                continue
            last = stage == self.stages - 1
            here = {("F", stage, chunk)} if kind is Kind.F and not last else set()
            found.append(len(alive) * (1 + count))
            if kind is Kind.F:
                alive |= here
                continue
            alive -= {("F", stage - 1, chunk), ("B", stage, chunk)}
            alive |= {("B", stage - 1, chunk)} if stage else set()
        assert not alive
        return found


def whole_graph(net):
    """A double backward of the plain module, as one writes it."""
    params = list(net.model.parameters())
    vector = [torch.ones_like(parameter) for parameter in params]

    def run():
        grads = torch.autograd.grad(functional.mse_loss(net.model(net.x), net.y), params, create_graph=True)
        return torch.autograd.grad(grads, params, vector)

    return run, vector


def saved_law(net, found):
    """One stage's graph of one chunk, and numbers of no size: the loss, its weight, its derivative."""
    assert net.graph * ACTIVATION <= found <= net.graph * ACTIVATION + 64


def alive_law(net, found, count, matrix):
    """At the worst action: what is on its way and one graph, the gradient that came being in both; and the products.

    The second derivative of the graph (Hessian) first goes through that of the gradient, and keeps what it finds for
    each of the D outputs until it comes to them. Each vector has what goes into and comes out of the stage.
    """
    worst = max(net.messages(count)) + net.graph - 1
    waiting = DEPTH if matrix is Hessian else 0
    stage = net.parameters // net.stages
    assert found >= worst * ACTIVATION
    beside = count * net.parameters + (1 + count) * stage
    assert found <= (worst + waiting + AROUND + 2 * count) * ACTIVATION + beside


# ------------------------------------------------------------------------------------------------------- at the most


@every_matrix
@every_shape
def test_autograd_holds_one_stages_graph_of_one_chunk(matrix, schedule, stages, chunks):
    net = Net(schedule, stages, chunks)
    run, vectors = net.products(matrix, 1)
    found, left = net.peak(saving, run, vectors)
    saved_law(net, found)
    assert left == 0


@every_matrix
def test_autograd_holds_no_more_for_four_products_at_once(matrix):
    net = Net("1f1b", 3, 4)
    run, vectors = net.products(matrix, 4)
    saved_law(net, net.peak(saving, run, vectors)[0])


@pytest.mark.parametrize("count", [1, 3])
@every_matrix
@every_shape
def test_what_is_alive_is_one_graph_and_the_messages_on_their_way(matrix, schedule, stages, chunks, count):
    net = Net(schedule, stages, chunks)
    run, vectors = net.products(matrix, count)
    found, _ = net.peak(Living, run, vectors)
    alive_law(net, found, count, matrix)


@every_shape
def test_a_double_backward_through_everything_breaks_both_laws(schedule, stages, chunks):
    """It holds the graph of all stages and chunks; where there is one of each, that is what the law allows."""
    net = Net(schedule, stages, chunks)
    run, vector = whole_graph(net)
    saved, left = net.peak(saving, run, vector)
    assert left == 0
    assert saved == (3 * stages * DEPTH - 1) * chunks * ACTIVATION + 8  # the input is x itself; and the loss
    if stages * chunks == 1:
        return
    with pytest.raises(AssertionError):
        saved_law(net, saved)
    with pytest.raises(AssertionError):
        alive_law(net, net.peak(Living, run, vector)[0], 1, Hessian)


def test_gpipe_has_all_chunks_on_their_way_and_1f1b_as_many_as_there_are_stages():
    """What the messages' law counts, for one vector: two tensors each."""
    gpipe, one = max(Net("gpipe", 4, 8).messages(1)), max(Net("1f1b", 4, 8).messages(1))
    assert gpipe >= 2 * 3 * 8 - 2
    assert one <= 2 * (3 + 2 + 1 + 3)


# ----------------------------------------------------------------------------------------------------------- afterwards


@pytest.mark.parametrize("count", [1, 4])
@every_matrix
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_nothing_stays_of_products_but_the_products_and_they_go_with_their_last_reference(matrix, schedule, count):
    """Without the collector: nothing hangs in a cycle, neither what was computed with nor a vector."""
    net = Net(schedule, 3, 4)
    run, vectors = net.products(matrix, count)
    with no_collector():
        held = Bytes([*net.model.parameters(), net.x, net.y, *vectors])
        with Living(held):
            found = run()
        assert held.now == count * net.parameters
        del found
        assert held.now == 0


class Node:
    """What lives as long as a node of the graph."""


class Remembers(nn.Module):
    """Weak references to what it reads, and to the graph of what it makes; may fail."""

    def __init__(self):
        super().__init__()
        self._seen = outside([])  # of what hangs on the module a product leaves no trace
        self.fails_at = None

    @property
    def seen(self):
        return self._seen()

    def forward(self, x):
        out = x * x
        self.seen.extend([weakref.ref(x), weakref.ref(out)])
        if out.grad_fn is not None:
            node = out.grad_fn.metadata["node"] = Node()
            self.seen.append(weakref.ref(node))
        if self.fails_at is not None and 0 < self.fails_at <= len(self.seen):
            raise RuntimeError("the layer fails")
        return out

    def alive(self):
        return [ref for ref in self.seen if ref() is not None]


def remembering(stages, schedule="1f1b", **settings):
    torch.manual_seed(6)
    layers = [layer for _ in range(stages) for layer in (nn.Linear(3, 3), Remembers())]
    model = nn.Sequential(*layers).double()
    return model, Pipe(model, [2] * stages, 4, schedule=schedule, checkpoint="always", **settings)


@pytest.mark.parametrize("workers", ["inline", "threads"])
@every_matrix
def test_inputs_and_graphs_of_all_stages_are_gone_after_a_product(matrix, workers):
    model, pipe = remembering(3, workers=workers)
    op = matrix(pipe, (normal(8, 3), normal(8, 3, seed=2)), functional.mse_loss)
    vector = op.space.random("normal", 0, 0)
    with no_collector():
        for _ in range(5):  # calls that look at more, and one that does not
            op.products([vector])
            for layer in model[1::2]:
                assert len(layer.seen) >= 4 and not layer.alive()
                layer.seen.clear()


@pytest.mark.parametrize("workers", ["inline", "threads"])
@every_matrix
def test_inputs_and_graphs_are_gone_after_a_product_that_fails(matrix, workers):
    """In the forward, and when it is computed again; the collector may be needed: an exception holds its frames."""
    model, pipe = remembering(3, workers=workers)
    op = matrix(pipe, (normal(8, 3), normal(8, 3, seed=2)), functional.mse_loss)
    vector = op.space.random("normal", 0, 0)
    model[3].fails_at = 0
    for _ in range(3):
        op.products([vector])
    length = len(model[3].seen)
    model[3].seen.clear()
    for at in (6, length // 6):
        model[3].fails_at = at
        with pytest.raises(RuntimeError, match="the layer fails"):
            op.products([vector])
        gc.collect()
        assert not [ref for layer in model[1::2] for ref in layer.alive()]
        for layer in model[1::2]:
            layer.seen.clear()
    model[3].fails_at = None
    assert torch.isfinite(op.products([vector])[0][0]).all()
