"""External leaves: leaves of the user that a stage's graph reaches, and that are no parameters of its modules.

A layer may capture one in a list, a closure or a cache. Through `.grad` it would get each chunk's part separately, and
its hooks would run on each; so its sum is kept here. The graph is retained, since chunks share what was computed
outside the stage.

A forward may make leaves. Those that only its graph holds are its own affair (`graph.requestable`). One that something
keeps (a parameter that a layer makes when it is first called) has a gradient that someone may want, and a recomputation
makes another in its place: that is refused.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from pipeline.common.errors import CheckpointError
from pipeline.common.graph import Roots, explore, refuse_marked, run_backward, sum_with
from pipeline.stage.hooks import grads_apart


class ExternalLeaves:
    """The external leaves of one stage during one call.

    Args:
        stage: how errors name the stage.
        lock: held while the hooks of leaves that several stages may have captured are disabled.

    Attributes:
        leaves: by id.
    """

    def __init__(self, stage: str, lock: threading.Lock) -> None:
        self.leaves: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}  # when a forward met it first
        self._reached: dict[int, set[int]] = defaultdict(set)  # by chunk
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._stage = stage
        self._lock = lock

    def learn(self, chunk: int, leaves: dict[int, Tensor], layer_inputs: Sequence[Tensor]) -> None:
        """Note the leaves that a chunk's graph reaches besides the stage's parameters.

        Args:
            chunk: which.
            leaves: the leaves, by id.
            layer_inputs: what the layers got: of that a layer may make leaves.

        Raises:
            RuntimeError: a leaf belongs to another chunk, another stage or to an earlier call.
        """
        for key, leaf in leaves.items():
            if not any([leaf is tensor for tensor in layer_inputs]):
                refuse_marked(leaf, self._stage)
                self.leaves[key] = leaf
                self._reached[chunk].add(key)
                self._versions.setdefault(key, leaf._version)

    def check_reached(self, chunk: int, outputs: Sequence[Tensor]) -> None:
        """Raise if a recomputation does not reach a leaf that its forward reached.

        Args:
            chunk: which.
            outputs: of the recomputation.
        """
        if chunk in self._reached:
            reached = explore([output for output in outputs if output.requires_grad])
            for key in self._reached[chunk] - reached.keys():
                raise CheckpointError(
                    f"the recomputation of {self._stage}, chunk {chunk}, made a tensor that needs a gradient (shape "
                    f"{list(self.leaves[key].shape)}) anew, which its forward had made and something keeps: its "
                    "gradient would be lost. If a layer makes parameters when it is first called, call the model "
                    "before the Pipe is built: with torch.no_grad(): model(x). Keep what is of one forward alone in a "
                    "local variable, over which no hook on the output closes; or use checkpoint='never' and no "
                    "create_graph."
                )

    def check_versions(self, chunk: int) -> None:
        """Raise if one was written since F."""
        for key, leaf in self.leaves.items():
            if leaf._version != self._versions[key]:
                raise CheckpointError(
                    f"a tensor (shape {list(leaf.shape)}) that {self._stage} captured was changed in place between the "
                    f"forward and the recomputation of chunk {chunk}. Change it after backward()."
                )

    def differentiate(self, roots: Roots) -> None:
        """Run a backward that reaches external leaves, of the stage or of the loss behind it."""
        external = list({**self.leaves, **roots.foreign}.values())
        with self._lock, grads_apart(external) as parts:
            run_backward(roots.tensors, roots.grads, retain=True)
        for leaf, grad in zip(external, parts, strict=True):
            if grad is not None:
                _, total = self._sums.get(id(leaf), (leaf, None))
                self._sums[id(leaf)] = leaf, sum_with(total, grad, leaf)

    def take_sums(self) -> list[tuple[Tensor, Tensor]]:
        """(Leaf, this stage's sum over chunks) of all that have one; forgets the sums."""
        sums, self._sums = self._sums, {}
        return list(sums.values())
