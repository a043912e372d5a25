"""The outputs that a stage has handed over, and that no later forward of the stage may write.

    F(i)   out_i --handed over--> the next stage, the loss, the caller
    F(j)   a layer that writes in every forward into a tensor that it keeps, and returns that, writes out_i too
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

from torch import Tensor

from pipeline.data.pytrees import versions


class HandedOutputs:
    """The outputs of one stage in one call, as long as something holds them.

    Args:
        stage: how errors name the stage.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._handed: list[tuple[int, ref[Tensor], int]] = []  # chunk, tensor, its version as the forward began

    def begin(self) -> None:
        """Begin a forward. Those who got an output may have written it by now."""
        alive = [(chunk, tensor, tensor()) for chunk, tensor, _ in self._handed]
        self._handed = [(chunk, tensor, versions([output])[0]) for chunk, tensor, output in alive if output is not None]

    def hand_over(self, chunk: int, outputs: Sequence[Tensor]) -> None:
        """Note the outputs of a chunk, after its forward.

        Raises:
            RuntimeError: that has written the outputs of an earlier one.
        """
        for earlier, tensor, version in self._handed:
            output = tensor()
            if output is not None and versions([output]) != (version,):
                raise RuntimeError(
                    f"the forward of chunk {chunk} in {self._stage} wrote the output of chunk {earlier} (shape "
                    f"{list(output.shape)}): a layer returns a tensor that it keeps and writes in every forward. "
                    "Return a copy: out.clone()."
                )
        self._handed += [(chunk, ref(output), 0) for output in outputs]

    def clear(self) -> None:
        """Forget them."""
        self._handed.clear()
