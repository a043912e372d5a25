"""The probe: forwards of a few rows, uncut, that show whether a mini-batch may be cut into chunks.

    alone    the rows of chunk 0                     stage after stage, one chunk: the reference
    beside   every second row is its neighbour       the rows between must come out as they were, or layers mix rows
    resized  three or four rows, at other places     sizes of outputs must follow, or they cannot be joined;
                                                     rows must come out as alone, or layers count or number rows
    order    the last stage first, after others      a stage that gives something else reads what another one left,
                                                     or keeps something of its rows for the next chunk

With others beside them, rows are compared among as many rows, under the same seeds: the same kernels run, and random
numbers are the same. What is no row of an output, such as h_n of nn.GRU or a Gram matrix, is found in the same way. For
another number of rows other kernels may run, and round otherwise: there a row must change by a twentieth, in the same
layer for other rows too, and a layer that draws is not judged. Without gradients, and in eval mode, since BatchNorm is
known to look at all rows in train mode; the order is looked at in the caller's modes, and in train mode rows with
others beside them once more, with BatchNorm in eval mode and no layer judged that draws. Afterwards buffers, attributes
of modules and generators are as before; `is_recomputing()` says yes meanwhile.

A probe raises nothing where it cannot judge: layers that raise on another number of rows, or give other values each
time.

It runs through the same engine and transports as any call, so that over ranks nothing is assumed of what lies between
stages: only outputs are compared. What it finds must show again before it is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from partition.compilation import uncompiled
from partition.contents import unwritten, wraps
from partition.modes import mode_of, modes_of
from partition.rows import row_dim
from pipeline.common.module_tables import modules_of, training_flags
from pipeline.common.torch_modes import without_counting_modes, without_function_modes
from pipeline.data.microbatch import Batch, check_structure, row_sizes
from pipeline.data.pytrees import Tree
from pipeline.entry.probe.probe_call import LayerRun, ProbeCall
from pipeline.entry.probe.rows import RowComparison, all_same, any_differs, is_mixed, is_moved, same_rows
from pipeline.execution.setup import Setup
from pipeline.recompute.buffers import on_copies
from pipeline.recompute.policy import repeating
from pipeline.recompute.reachable import ReachableState
from pipeline.recompute.snapshot import StageTraits


class Probe:
    """The probe of one call.

    Args:
        setup: of the call, with the plan of one uncut chunk.
        batch: the input of the call, cut. Of several mini-batches one with the most chunks is looked at.
        checks_rows: whether layers may not mix rows.
        gathers: whether chunks follow each other, as in a step: each finds what the one before has left, and layers may
            gather statistics of their rows all the same. In a product each finds the state of the mini-batch.
    """

    def __init__(self, setup: Setup, batch: Batch, checks_rows: bool, gathers: bool) -> None:
        self._communicator = setup.communicator
        self._checks_rows = checks_rows
        self._is_trained = setup.grad
        self._setup = replace(
            setup, recompute=frozenset(), grad=False, keep=False, compares=False, defer=False, traces=(),
            traits=StageTraits(),
            layout=replace(setup.layout, workers="inline" if setup.communicator.is_alone else None),
        )
        self._batch = max(batch.mini_batches, key=lambda part: part.chunks)
        self._another = batch.mini_batches[-1]
        self._rows = min(sum(self._batch.rows), max(2, self._batch.rows[0]))
        own_stages = [layers for index, layers in enumerate(setup.stages) if setup.communicator.topology.has(index)]
        self._modules = modules_of([top for layers in own_stages for top in layers])
        self._modes: Sequence[bool] = modes_of(self._modules)  # in which the next run computes
        self._gathers = gathers

    def check(self) -> None:
        """Raise if the mini-batch cannot be cut.

        Raises:
            ValueError: layers mix rows, or their gradients do, or an output has no rows.
            RuntimeError: a stage reads state that another stage wrote.
        """
        if self._checks_rows and self._is_trained and self._batch.chunks > 1:
            self._check_frequencies()
        alone = self._picked(range(self._rows))
        parameters = [
            parameter
            for module in self._modules
            for parameter in module._parameters.values()
            if parameter is not None
        ]
        with (
            torch.no_grad(), repeating(), uncompiled(), without_counting_modes(), unwritten(parameters) as contents,
            on_copies(self._modules),  # written back to, buffers would seem written to a graph that has saved them
        ):  # fmt: skip
            reachable = ReachableState(self._modules)
            self._generators = reachable.generators
            self._undo = [reachable.put_back, contents.put_back]
            if self._keeps_no_rows or self._stages_share_a_process():
                self._check_order(alone, self._others())
            if self._batch.chunks == 1:  # of several mini-batches: it is not cut
                return
            self._modes = [False] * len(self._modules)
            reference = self._run(alone)
            if self._batch.rows[0] == 1 and self._communicator.exchange.any(None in reference.stage_outputs.values()):
                self._rows = sum(self._batch.rows)  # a mask of that size fits all rows, and one: that is broadcast
                alone = self._picked(range(self._rows))
                reference = self._run(alone)
            rows = self._rows
            beside = self._picked([row if row % 2 else row + 1 if row + 1 < rows else row - 1 for row in range(rows)])
            places = [1, 2, 2, 3] if rows == 3 else [1, rows - 1, rows]  # all have moved; another row is the last one
            resized = self._run(self._picked(places))
            self._check_sizes(reference, resized, len(places))
            if self._checks_rows:
                self._check_rows(alone, beside, reference)
                self._check_places(reference, resized, places)
                self._modes = [mode_of(module) and not isinstance(module, _BatchNorm) for module in self._modules]
                if self._communicator.exchange.any(any(self._modes)):
                    self._check_rows(alone, beside, self._run(alone), " in train mode")

    @property
    def _keeps_no_rows(self) -> bool:
        """Whether a layer may keep nothing of its rows for its next call, which a chunk of the mini-batch would be."""
        return self._checks_rows and self._batch.chunks > 1 and self._gathers

    def _stages_share_a_process(self) -> bool:
        """Whether some process has several stages, which may leave something to each other."""
        stages, lanes = len(self._setup.stages), Counter(self._setup.plan.schedule.placement.lane_of)
        return all(map(self._communicator.topology.has, range(stages))) and stages > 1 or max(lanes.values()) > 1

    def _check_frequencies(self) -> None:
        """Raise if a layer divides its gradient by what it counts in all rows."""
        for module in self._modules:
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq:
                raise ValueError(
                    f"a layer has {type(module).__name__}(scale_grad_by_freq=True), which divides gradients by how "
                    "often an index occurs in the mini-batch. Chunks see their own rows only, so gradients would not "
                    "be those of the plain module. If each chunk may count by itself, use Pipe(..., mixes_rows=True); "
                    "else set it to False, or chunks=1."
                )

    def _others(self) -> Batch:
        """As many other rows, uncut: the last ones, or another mini-batch."""
        total = sum(self._batch.rows)
        return self._another if total == self._rows == 1 else self._picked(range(total - 1, total - 1 - self._rows, -1))

    def _picked(self, rows: Sequence[int]) -> Batch:
        """Some rows of the mini-batch, uncut. Behind the last one comes the first."""
        whole, batch_dim = self._batch.tree, self._batch.batch_dim
        rows = [row % sum(self._batch.rows) for row in rows]
        with without_function_modes():
            tensors = tuple([
                _rows_of(tensor.detach(), rows, row_dim(tensor, batch_dim)) if is_cut else tensor
                for tensor, is_cut in zip(whole.tensors, self._batch.cut, strict=True)
            ])
        pieces = tuple([(tensor,) for tensor in tensors])
        return Batch(Tree(tensors, whole.skeleton), self._batch.cut, (len(rows),), pieces, batch_dim)

    def _new(self, batch: Batch) -> ProbeCall:
        return ProbeCall(self._setup, batch, self._generators, self._put_back)

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """Within: a run, in some modes. At the end: modules as they were: the next run finds what it found."""
        try:
            with training_flags(self._modules, self._modes):
                yield
        finally:
            for undo in self._undo:
                undo()

    def _run(self, batch: Batch) -> ProbeCall:
        call = self._new(batch)
        call.run()
        return call

    def _check_sizes(self, reference: ProbeCall, resized: ProbeCall, rows: int) -> None:
        """Raise if the size of an output does not follow the rows, or its structure does."""
        if reference.output is None or resized.output is None:
            return
        check_structure((reference.output, resized.output), (self._rows, rows))
        for pair in zip(reference.output.tensors, resized.output.tensors, strict=True):
            if pair[0].dim() and pair[0].dim() == pair[1].dim():  # else they are seen not to fit where they are joined
                row_sizes(pair, (self._rows, rows), self._batch.batch_dim)

    def _check_rows(self, alone: Batch, beside: Batch, reference: ProbeCall, when: str = "") -> None:
        """Raise if a row's output depends on the rows beside it, `when` also by no draw: its number may be theirs."""
        differs = partial(is_mixed, batch_dim=self._batch.batch_dim, rows=self._rows)
        among_others = self._run(beside)  # on every rank, as everything here: votes follow
        if not self._communicator.exchange.any(_differ(reference, among_others, differs)):
            return
        repeated, among_others = self._new(alone), self._new(beside)  # again, layer by layer
        ours, theirs = repeated.run_recorded(), among_others.run_recorded()
        is_certain = _differ(repeated, among_others, differs) and same_rows(repeated.output, reference.output)
        if not self._communicator.exchange.any(is_certain):
            return
        culprit, _ = _first_to_differ(ours, theirs, partial(differs, least=0.0))  # what later layers have enlarged, too
        self._refuse(
            culprit, self._may_gather(culprit, draws_too=bool(when)),
            f"mixes the rows of the mini-batch{when}: with other rows beside it, a row comes out otherwise"
        )

    def _check_places(self, reference: ProbeCall, resized: ProbeCall, places: Sequence[int]) -> None:
        """Raise if a row's output depends on its place, or on the number of rows."""
        differs = partial(is_moved, batch_dim=self._batch.batch_dim, rows=self._rows, places=places)
        if not self._communicator.exchange.any(_differ(reference, resized, differs)):
            return
        culprits, draws, first = [], False, self._new(self._picked(range(self._rows)))
        for shift in (0, 1):  # for the same rows and for others, layer by layer: a near tie shows once
            repeated = self._new(self._picked(range(shift, shift + self._rows))) if shift else first
            moved = self._new(self._picked([place + shift for place in places]))
            culprit, earlier = _first_to_differ(repeated.run_recorded(), moved.run_recorded(), differs)
            culprits.append(culprit)
            draws |= any([run.draws for run in earlier])  # little noise, which this one may have enlarged
        culprit = culprits[0] if len({run and run.number for run in culprits}) == 1 else None
        if not self._communicator.exchange.any(culprit is not None):
            return
        is_excused = draws or self._may_gather(culprit) or not same_rows(first.output, reference.output)
        self._refuse(
            culprit, is_excused,
            "reads the number or the places of the rows of the mini-batch: at another place, among another number of "
            "rows, a row comes out otherwise"
        )

    def _may_gather(self, culprit: LayerRun | None, draws_too: bool = False) -> bool:
        """Whether a layer gathers statistics of its rows, or draws, as it may in train mode alone.

        A BatchNorm gathers them, and so does what writes its buffers; in eval mode that writes rows, as of a cache.
        """
        if culprit is None or not self._gathers:
            return False
        norms = [module for module in culprit.layer.modules() if isinstance(module, _BatchNorm)]
        is_trained = mode_of(culprit.layer)
        return any(map(mode_of, norms)) or is_trained and (culprit.writes or draws_too and culprit.draws)

    def _refuse(self, culprit: LayerRun | None, is_excused: bool, words: str) -> None:
        """Raise on the ranks that have the layer, or, if none is to be named, on the last one."""
        if self._communicator.exchange.any(is_excused):
            return  # such as statistics of all rows, which each chunk gathers by itself, as is documented of BatchNorm
        if self._communicator.exchange.any(culprit is not None) and culprit is None:
            return  # another rank has the layer, and raises
        if culprit is None and not self._communicator.topology.has(len(self._setup.stages) - 1):  # not the last stage
            return
        subject = "a layer" if culprit is None else f"layer {culprit.number} ({type(culprit.layer).__name__})"
        batch_dim = self._batch.batch_dim
        other_dim = 1 if batch_dim == 0 else 0
        raise ValueError(
            f"{subject} {words}. Chunks are cut along dim {batch_dim}, so each would see its own rows only, and "
            f"numbers would not be those of the plain module. If dim {other_dim} counts the rows, use Pipe(..., "
            f"batch_dim={other_dim}), or batch_first={batch_dim == 0} in nn.LSTM, nn.GRU, nn.TransformerEncoderLayer "
            "and the like. If a tensor of the input has no rows (a mask of as many positions), mark it: NoChunk(mask). "
            "If each chunk may be computed by itself, as BatchNorm does in train mode, use "
            "Pipe(..., mixes_rows=True); else chunks=1."
        )

    def _check_order(self, alone: Batch, others: Batch) -> None:
        """Raise if a stage gives other values, or raises, after other rows have gone through all stages.

        Not of a layer that counts its calls, whose values are other ones each time, and do not follow from the rows.
        """
        in_order = self._run(alone)
        after_others = self._new(others).run_before(in_order)
        astray = [
            stage for stage, (outputs, *_) in after_others.items()
            if not all_same(outputs, in_order.stage_outputs[stage])
        ]  # fmt: skip
        if not self._communicator.exchange.any(bool(astray)):
            return
        once_more = self._run(alone)
        after_others, after_same, after_others_again = [
            self._new(rows).run_before(in_order, is_judged=True) for rows in (others, alone, others)
        ]  # fmt: skip
        for stage in astray:
            name, (outputs, *repeated) = in_order.stages[stage].layers.name, after_others[stage]
            expected = in_order.stage_outputs[stage]
            if not all_same(once_more.stage_outputs[stage], expected) or all_same(outputs, expected):
                continue
            if all([all_same(other, outputs) for other in repeated]):
                raise RuntimeError(
                    f"{name} gives other values, or raises, for the same input when other chunks have run before it: "
                    "it reads what another stage, or an earlier chunk, left elsewhere (in a shared dict, on a module, "
                    "in a closure). Stages run different chunks at a time, so the numbers would depend on the "
                    "schedule. Return it from the stage that makes it and pass it on, stash and pop it "
                    "(pipeline.skip), or put these layers into one stage. If a layer keeps something of its first "
                    "batch, call the model with one before."
                )
            is_of_rows = not all_same(after_same[stage][0], outputs)
            if self._keeps_no_rows and is_of_rows and all_same(after_others_again[stage][0], outputs):
                raise RuntimeError(
                    f"{name} gives other values for the same input when chunks of other rows have run before it: a "
                    "layer keeps something of its rows for its next call, such as the hidden state of an LSTM. Each "
                    "chunk would find what other rows left, and numbers would not be those of the plain module. Use "
                    "chunks=1; or return the state, and give it to the next call with its rows. If each chunk may "
                    "find what the one before has left, use Pipe(..., mixes_rows=True)."
                )


def _first_to_differ(
    ours: Sequence[LayerRun], theirs: Sequence[LayerRun], differs: RowComparison
) -> tuple[LayerRun | None, Sequence[LayerRun]]:
    """The first layer whose output rows have changed though its input rows have not, and all up to it."""
    for number, (our_run, their_run) in enumerate(zip(ours, theirs)):
        if any_differs(our_run.inputs, their_run.inputs, differs):
            return None, ours[:number]
        if any_differs(our_run.outputs, their_run.outputs, differs):
            return our_run, ours[: number + 1]
    return None, ours


def _differ(reference: ProbeCall, probed: ProbeCall, differs: RowComparison) -> bool:
    """Whether rows of an output have changed."""
    if reference.output is None or probed.output is None:
        return False
    return any_differs(reference.output.tensors, probed.output.tensors, differs)


def _rows_of(tensor: Tensor, rows: Sequence[int], dim: int) -> Tensor:
    """Some rows of a tensor, which a dim counts. A DTensor takes no index that is none."""
    if wraps(tensor):
        return torch.cat([tensor.narrow(dim, row, 1) for row in rows], dim)
    return tensor.index_select(dim, torch.tensor(rows, device=tensor.device))
