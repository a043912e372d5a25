"""Pipeline parallelism for PyTorch: the plain module's numbers, at every order of derivative.

    from pipeline import Pipe
    pipe = Pipe(model, balance=[2, 2], chunks=4)
"""

__version__ = "0.1.0"

from pipeline.blocks import CheckpointedBlocks, checkpoint_blocks
from pipeline.checkpoint import is_checkpointing, is_recomputing
from pipeline.eager import EagerUpdate
from pipeline.eager_backward import eager_backward
from pipeline.errors import CheckpointError, StuckError
from pipeline.gradstore import GradStore
from pipeline.microbatch import NoChunk
from pipeline.pipe import Pipe
from pipeline.randomness import layer_seed
from pipeline.ranks.agreement import MismatchError
from pipeline.ranks.failure import RankError
from pipeline.step_door import Step

__all__ = [
    "CheckpointError",
    "CheckpointedBlocks",
    "EagerUpdate",
    "GradStore",
    "MismatchError",
    "NoChunk",
    "Pipe",
    "RankError",
    "Step",
    "StuckError",
    "checkpoint_blocks",
    "eager_backward",
    "is_checkpointing",
    "is_recomputing",
    "layer_seed",
]
