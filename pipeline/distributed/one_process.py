"""A context in which other libraries see one process.

    torchrun --> pipe = Pipe(...)  --> with as_one_process(): Trainer(pipe).fit(...)
                 joins the ranks                              on each rank, with the same data, and no wrapper

What trains in loops of its own (transformers' Trainer, accelerate, Lightning) looks in the environment for ranks, gives
each other data, and wraps the model to average gradients: right for replicas of a model, wrong for its stages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
          "ROLE_WORLD_SIZE")  # fmt: skip


@contextmanager
def as_one_process() -> Iterator[int]:
    """Within: the environment does not tell that torchrun has started several processes. A Pipe knows its ranks.

    In one process nothing changes, so a script is the same with torchrun and without.

    Yields:
        The number of this process, such as 0 for the one that logs and saves.

    Raises:
        RuntimeError: torch.distributed is not initialised. A Pipe that was built within would have all layers here.

    Example:
        >>> from pipeline import as_one_process
        >>> with as_one_process() as rank:
        ...     print(rank)
        0
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "as_one_process() was entered before the ranks have joined: a Pipe that is built within would take itself "
            "for the only one. Build the Pipe first, or call torch.distributed.init_process_group()."
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    hidden = {name: os.environ[name] for name in os.environ if name in _NAMES or name.startswith("TORCHELASTIC_")}
    for name in hidden:
        del os.environ[name]
    try:
        yield rank
    finally:
        os.environ.update(hidden)
