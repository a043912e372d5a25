"""Names of actions in the traces of torch.profiler, and so in Perfetto and TensorBoard.

    with torch.profiler.profile() as trace:       "1F0: forward, stage 1, chunk 0"  around the operators of that action
        pipe.step(x, y, loss_fn=f)                "probe"  around those with which a validating call checks the layers
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.autograd.profiler as profiler

from scheduler import Action
from scheduler.action import WORDS

_NOTHING = nullcontext()


def named(label: Action | str) -> AbstractContextManager[object]:
    """Within, what runs stands in a profile under the name of an action, or another. Nothing, where none is made."""
    if not profiler._is_profiler_enabled:
        return _NOTHING
    if isinstance(label, Action):
        label = f"{label}: {WORDS[label.kind]}, stage {label.stage}, chunk {label.chunk}"
    return profiler.record_function(label)
