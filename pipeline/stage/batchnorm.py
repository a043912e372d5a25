"""BatchNorm's running statistics of the whole mini-batch, from the moments of its chunks.

    F of chunk i   each batch norm computes on empty running statistics with momentum 1: what it leaves there is the
                   mean and the variance of this chunk                                      moments[i], rows counted
    all F done     the moments of all chunks make those of the mini-batch, and the running statistics are updated once

Chunks are normalised by their own statistics, as always. Only the statistics for eval mode are updated later, at the
end of the mini-batch. Variances are combined with the means' differences, not from sums of squares (Chan, Golub and
LeVeque 1983), so nothing is lost where the mean is large. The modules stay the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from partition.precision import widened
from pipeline.common.errors import CheckpointError
from pipeline.common.module_tables import buffers_of
from pipeline.skip import within_scope

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class _Moments(NamedTuple):
    rows: int  # values per channel
    mean: Tensor
    variance: Tensor  # unbiased


class _StateBefore(NamedTuple):
    """The state of a batch norm before it computes."""

    buffers: dict[str, Tensor | None]
    momentum: float | None


_NormCall: TypeAlias = tuple[_BatchNorm, int]  # a norm, and the number of the call for a chunk


class DeferredBatchNorms:
    """The batch norms of one stage during one call.

    Args:
        layers: the layers of the stage.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._norms = list(dict.fromkeys(norm for layer in layers for _, norm in within_scope(layer, _BatchNorm)))
        self._moments: dict[int, dict[_NormCall, _Moments]] = {}  # by chunk

    @contextmanager
    def within(self, chunk: int | None) -> Iterator[None]:
        """Within: running statistics stay as they are. The moments of `chunk` are recorded (None: they are known)."""
        moments: dict[_NormCall, _Moments] = {}
        states: dict[_BatchNorm, _StateBefore] = {}  # of norms that compute now

        def before(norm: _BatchNorm, *_: Any) -> None:
            if norm in states:  # its forward raised, and the layer that called it caught that
                _put_back(norm, states.pop(norm))
            if _tracks(norm) and norm.running_mean is not None:
                states[norm] = _StateBefore({name: norm._buffers[name] for name in _RUNNING}, norm.momentum)
                for name in _RUNNING:
                    buffer = norm._buffers[name]
                    norm._buffers[name] = None if buffer is None else torch.zeros_like(buffer)
                norm.momentum = 1.0

        def after(norm: _BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
            if norm in states:
                mean, variance = norm._buffers["running_mean"], norm._buffers["running_var"]
                assert mean is not None and variance is not None  # `before` put them there
                _put_back(norm, states.pop(norm))
                number = sum(1 for other, _ in moments if other is norm)
                batch: Tensor = args[0] if args else kwargs["input"]
                moments[norm, number] = _Moments(batch.numel() // batch.size(1), mean, variance)

        with ExitStack() as hooks:
            for norm in self._norms:
                hooks.enter_context(norm.register_forward_pre_hook(before))
                hooks.enter_context(norm.register_forward_hook(after, prepend=True, with_kwargs=True))
            try:
                yield
            finally:
                for norm, state in states.items():  # one that raised
                    _put_back(norm, state)
        if chunk is not None:
            self._moments[chunk] = moments

    @contextmanager
    def refused(self, stage: str) -> Iterator[None]:
        """Within (a backward): a batch norm that computes again is an error."""

        def refuse(norm: _BatchNorm, _: Any) -> None:
            if _tracks(norm):
                raise CheckpointError(
                    f"a batch norm of {stage} computes again in the backward (within torch.utils.checkpoint), where "
                    "deferred_batch_norm=True cannot put off its running statistics. Use the Pipe's checkpoint= "
                    "instead, or deferred_batch_norm=False."
                )

        with ExitStack() as hooks:
            for norm in self._norms:
                hooks.enter_context(norm.register_forward_pre_hook(refuse))
            yield

    def commit(self) -> list[nn.Module]:
        """Update the running statistics once, after all chunks.

        Returns:
            The modules that were updated, and those that compute without their hooks and should have been.
        """
        by_call: dict[_NormCall, list[_Moments]] = {}
        for chunk in sorted(self._moments):
            for call, moments in self._moments[chunk].items():  # in the order of the calls
                by_call.setdefault(call, []).append(moments)
        with torch.no_grad():
            for (norm, _), parts in by_call.items():
                _update(norm, _combined(parts))
        self._moments.clear()
        updated = {norm for norm, _ in by_call}
        return [norm for norm in self._norms if norm in updated or _tracks(norm)]


def check_deferrable(module: nn.Module) -> None:
    """
    Raises:
        TypeError: a batch norm has other statistics than those of its own input.
    """
    for path, part in within_scope(module, nn.Module):
        is_compiled = isinstance(part, torch.jit.ScriptModule) and "running_mean" in buffers_of(part)
        if is_compiled or isinstance(part, _BatchNorm) and type(part).forward is not _BatchNorm.forward:
            raise TypeError(
                f"deferred_batch_norm=True cannot put off layer '{path}', a {type(part).__name__}: it is compiled by "
                "torch.jit, or has a forward of its own, which may use momentum and running statistics in another way "
                "(a SyncBatchNorm's are those of several processes). Use an nn.BatchNorm, with what the layer does "
                "besides in a module around it, or deferred_batch_norm=False."
            )


def _tracks(norm: _BatchNorm) -> bool:
    return norm.training and norm.track_running_stats


def _put_back(norm: _BatchNorm, state: _StateBefore) -> None:
    norm._buffers.update(state.buffers)
    norm.momentum = state.momentum


def _combined(parts: list[_Moments]) -> _Moments:
    count = sum(part.rows for part in parts)
    wide_moments = [(part.rows, widened(part.mean), widened(part.variance)) for part in parts]
    mean = torch.stack([part_mean * (rows / count) for rows, part_mean, _ in wide_moments]).sum(0)
    squares = torch.stack([
        variance * (rows - 1) + (part_mean - mean).square() * rows for rows, part_mean, variance in wide_moments
    ]).sum(0)
    return _Moments(count, mean, squares / (count - 1))


def _update(norm: _BatchNorm, moments: _Moments) -> None:
    """As `nn.BatchNorm` does."""
    tracked = norm._buffers["num_batches_tracked"]
    if tracked is not None:
        tracked.add_(1)
    share: float | Tensor = 0.0 if norm.momentum is None else norm.momentum  # 0.0: as torch's BatchNorm without a count
    if norm.momentum is None and tracked is not None:
        share = 1.0 / tracked.to(moments.mean.dtype)
    for name, batch_statistic in (("running_mean", moments.mean), ("running_var", moments.variance)):
        running = norm._buffers[name]
        assert running is not None  # it was there when the chunks ran
        running.copy_(widened(running) * (1.0 - share) + batch_statistic * share)
