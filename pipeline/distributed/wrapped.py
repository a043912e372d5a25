"""Refusals of layers, and of what is around a Pipe, that communicate with other processes by themselves.

    DistributedDataParallel(layer)      averages gradients as they come, but in a Pipe they come together elsewhere
    fully_shard(layer)                  puts a layer's parameters together for each forward, and takes them apart
    SyncBatchNorm, DTensor, over ranks  speak to ranks that have other stages
    DistributedDataParallel(pipe), ...  over the pipeline's own ranks take other stages for replicas

The errors say what does the same around a Pipe, or instead.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

OF_PARTS = "Use the optimizer itself, which steps the part that is here."


def check_wrapped(module: nn.Module) -> None:
    """Refuse layers that are wrapped for data parallelism by themselves.

    Raises:
        ValueError: it says which, and what to do.

    Example:
        >>> check_wrapped(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    """
    names = _names(module, DistributedDataParallel)
    if names:
        raise ValueError(
            f"DistributedDataParallel within the nn.Sequential: {names}. Its gradients would not be averaged, "
            "since a Pipe adds them up over the chunks first. Wrap the Pipe, DistributedDataParallel(Pipe(...)), or "
            "give Pipe(..., replicas=group)."
        )
    names = _names(module, *_imported("torch.distributed.fsdp", "FSDPModule", "FullyShardedDataParallel"))
    if names:
        raise ValueError(
            f"FSDP within the nn.Sequential: {names}. It puts parameters together for each forward and takes "
            "them apart afterwards, which a Pipe, that holds on to what its chunks computed with, does not survive. "
            "Leave fully_shard out: the stages divide the parameters between the ranks already, and replicas=group "
            "averages gradients."
        )


def check_over_ranks(module: nn.Module) -> None:
    """Refuse layers that communicate with ranks which may not take part. For Pipes over ranks or with replicas.

    Raises:
        ValueError: it says which, and what to do.
    """
    norms = _names(module, nn.SyncBatchNorm)
    if norms:
        raise ValueError(
            f"SyncBatchNorm in a Pipe over ranks: {norms}. It waits for all ranks of its group in every "
            "forward, but other stages' ranks never run it, and replicas may run other numbers of chunks. Use "
            "BatchNorm with deferred_batch_norm=True (statistics of the mini-batch), or a norm that needs no batch, "
            "such as nn.GroupNorm."
        )
    refuse_parts(
        module.named_parameters(), "a Pipe over ranks",
        "Messages between ranks hold whole tensors only. Tensor parallelism works with devices=[...], all stages in "
        "one process; over ranks and with replicas use plain parameters."
    )


def refuse_around(pipe: nn.Module, ranks: Collection[int]) -> None:
    """Refuse a wrapper that takes the ranks of a pipeline, which have other stages, for replicas.

    Args:
        pipe: a Pipe over ranks, or in one process.
        ranks: those of its pipeline, as the world numbers them.

    Raises:
        RuntimeError: one runs the Pipe, or has made it another class.
    """
    if isinstance(pipe, _imported("torch.distributed.fsdp", "FSDPModule")):
        raise RuntimeError(
            "fully_shard was called on a Pipe. It takes parameters apart that a Pipe's chunks compute with. Leave it "
            "out: the stages divide the parameters between the ranks already, and Pipe(..., replicas=group) averages "
            "gradients."
        )
    outer = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if outer is None:
        return
    common = sorted(set(distributed.get_process_group_ranks(outer.process_group)).intersection(ranks))
    if len(common) > 1:
        raise RuntimeError(
            f"DistributedDataParallel(pipe) takes ranks {common} for replicas, but they have different stages of one "
            "pipeline: it would mix their parameters, and has when it was built. Leave it out, or give it the ranks "
            'that have the same stages: process_group=mesh["dp"].get_group(). Pipe(..., replicas=group) averages '
            "gradients over these."
        )


def refuse_parts(named: Iterable[tuple[str, Tensor]], where: str, remedy: str) -> None:
    """Raise ValueError if there are DTensors among some parameters, of which each process holds a part."""
    kinds = _imported("torch.distributed.tensor", "DTensor")
    parts = [name for name, parameter in named if isinstance(parameter, kinds)]
    if parts:
        raise ValueError(f"DTensor parameters in {where}: {', '.join(parts)}. {remedy}")


def _names(module: nn.Module, *kinds: type) -> str:
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, kinds)]
    return ", ".join(f"{name or 'itself'} ({type(layer).__name__})" for name, layer in layers)


def _imported(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a module, if it was ever imported: else there are no objects of them."""
    kinds = [getattr(sys.modules.get(module), name, None) for name in names]
    return tuple([kind for kind in kinds if kind is not None])


def refuse_reduced(params: Iterable[Tensor], who: str) -> None:
    """Raise if a DistributedDataParallel waits for the gradients of these parameters, to average them.

    It hangs on autograd's nodes, where nobody sees it, so all that Python holds is looked through.

    Raises:
        RuntimeError: one does.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return
    param_ids = {id(param) for param in params}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DistributedDataParallel):
            if any(id(param) in param_ids for param in candidate.parameters()):
                raise RuntimeError(
                    f"{who} would update parameters of a DistributedDataParallel before their gradients are averaged. "
                    "Use Pipe(..., replicas=group), whose steps average first, or the optimizer itself."
                )
