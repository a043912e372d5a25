"""Pipeline parallelism for PyTorch: the plain module's numbers, at every order of derivative.

    from pipeline import Pipe
    pipe = Pipe(model, balance=[2, 2], chunks=4)
"""

__version__ = "0.1.0"

import sys

import pipeline.common  # noqa: F401  # first: it says which package of another project is found in the place of ours
from partition.rows import NoChunk
from pipeline.common.errors import CheckpointError, StuckError
from pipeline.common.places import Place
from pipeline.distributed.agreement import MismatchError
from pipeline.distributed.failure.errors import RankError
from pipeline.distributed.one_process import as_one_process
from pipeline.entry.eager_backward import eager_backward
from pipeline.entry.state.meta_init import reset_parameters
from pipeline.entry.state.meta_parameters import meta_parameters
from pipeline.entry.state.saved import Saved
from pipeline.entry.step import Step
from pipeline.gradients.eager import EagerUpdate
from pipeline.gradients.store import GradStore
from pipeline.pipe import Pipe
from pipeline.recompute import blocks, randomness
from pipeline.recompute.blocks import CheckpointedBlocks, checkpoint_blocks
from pipeline.recompute.policy import is_checkpointing, is_recomputing
from pipeline.recompute.randomness import layer_seed

__all__ = [
    "CheckpointError",
    "CheckpointedBlocks",
    "EagerUpdate",
    "GradStore",
    "MismatchError",
    "NoChunk",
    "Pipe",
    "Place",
    "RankError",
    "Saved",
    "Step",
    "StuckError",
    "as_one_process",
    "checkpoint_blocks",
    "eager_backward",
    "is_checkpointing",
    "is_recomputing",
    "layer_seed",
    "meta_parameters",
    "reset_parameters",
]

for _module in (blocks, randomness):  # paths that are documented
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
