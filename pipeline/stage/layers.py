"""The forward of a stage's layers on the values that the stage reads.

    value before them, skips that they pop  --layer after layer, each with its seed-->  value after them, skips stashed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partition.names import NamedLayer
from pipeline.common.interrupts import calls_users_code
from pipeline.common.module_tables import modules_of
from pipeline.common.torch_modes import without_function_modes
from pipeline.data.pytrees import Bundle, Tree, flatten
from pipeline.data.values import Values
from pipeline.recompute.randomness import quiet_layers, unobserved
from pipeline.skip import Key, Skippable, Skips
from pipeline.stage.outputs import HandedOutputs


class StageLayers:
    """The layers of one stage during one call.

    Args:
        index: the stage.
        first: index of its first layer in the Sequential.
        layers: the layers.
        values: what each stage reads and makes.

    Attributes:
        index: the stage.
        numbered: the layers with their indices.
        modules: all modules of the layers, each once, parents first.
        name: the stage, for messages.
        passes_one: whether all stages read one value and make one: there are no skips.
        quiet: the indices of layers that need no seed.
        is_quiet: whether no layer needs one: all are torch's own, which capture, keep and write nothing of others.
        pops: the number of skips that the stage reads.
        outputs: those that were handed over.
    """

    def __init__(self, index: int, first: int, layers: Sequence[nn.Module], values: Values) -> None:
        self.index = index
        self.numbered = tuple(enumerate(layers, first))
        self.modules = modules_of(layers)
        self.passes_one = len(values.rows) == len(values.made_by)
        self._popped = [row.name for row in values.read_by[index] if isinstance(row.name, Key)]
        self._stashed = [row.name for row in values.made_by[index] if isinstance(row.name, Key)]
        self._has_skips = any([isinstance(module, Skippable) for module in self.modules])
        self.name = stage_name(index, first, len(layers))
        self.outputs = HandedOutputs(self.name)
        self.quiet = quiet_layers(self.numbered) if unobserved() else frozenset()
        self.is_quiet = len(self.quiet) == len(self.numbered)

    @property
    def pops(self) -> int:
        return len(self._popped)

    def run(self, chunk: int, values: Sequence[Any], seed: Callable[[int, int], None]) -> Bundle:
        """Compute a chunk.

        Args:
            values: the value before the layers, then the skips that they pop.
            seed: called with (chunk, layer) before a layer that may draw random numbers.

        Raises:
            TypeError: the value after the layers holds an object that cannot cross stages.
        """
        if not self._has_skips:
            return Bundle.of((self._run(chunk, values[0], seed),))
        with Skips(zip(self._popped, values[1:], strict=True)) as skips:
            value = self._run(chunk, values[0], seed)
            stashed = [flatten(skips.take(key), f"{key} of {self.name}") for key in self._stashed]
        return Bundle.of((value, *stashed))

    def _run(self, chunk: int, value: Any, seed: Callable[[int, int], None]) -> Tree:
        tree = flatten(self._run_on(chunk, value, seed), f"the output of {self.name}")
        for tensor in tree.tensors:
            if tensor.requires_grad and tensor.is_leaf:
                return _without_leaves(tree)
        return tree

    @calls_users_code
    def _run_on(self, chunk: int, value: Any, seed: Callable[[int, int], None]) -> Any:
        """The layers alone, on the value before them."""
        quiet = self.quiet if type(value) is Tensor else ()
        for index, layer in self.numbered:
            if index not in quiet:
                seed(chunk, index)
            try:
                value = layer(value)
            except BaseException as error:
                error.add_note(_in_words(index, layer))
                for words, advice in _ADVICE.items():
                    known = words.format(type(layer).__name__)
                    if any([isinstance(word, str) and known in word for word in error.args]):
                        error.add_note(advice)
                raise
        return value


_ADVICE = {  # by words of torch's norms, and of Python about the layer
    "Expected more than 1 value per channel when training": (
        "The chunk has too few rows for a norm in train mode. Use fewer chunks, or a mini-batch with at least two rows "
        "for each chunk: drop_last=True of a DataLoader leaves out a smaller last one."
    ),
    "{}.forward() missing ": (
        "A layer is called with one value, as nn.Sequential calls it: several stand in a tuple, which the layer takes "
        "apart, def forward(self, values): hidden, mask = values."
    ),
}


def stage_name(index: int, first: int, layers: int) -> str:
    """A stage of so many layers, of which it has the first, in words.

    Example:
        >>> stage_name(1, 4, 2), stage_name(2, 6, 1)
        ('stage 1 (layers 4..5)', 'stage 2 (layer 6)')
    """
    return f"stage {index} (layer{f's {first}..{first + layers - 1}' if layers > 1 else f' {first}'})"


def _without_leaves(tree: Tree) -> Tree:
    """The value, with views of leaves: a leaf that a layer has made (`out.requires_grad_()`) is held by nothing here.

    So it is the forward's own affair, unless something else keeps it (external.py).
    """
    with without_function_modes():
        return tree._replace(tensors=tuple([
            tensor.view_as(tensor) if tensor.requires_grad and tensor.is_leaf and tensor.layout is torch.strided
            else tensor
            for tensor in tree.tensors
        ]))


def _in_words(index: int, layer: nn.Module) -> str:
    """A layer: its number, and its names in the model, or its type."""
    in_model = layer.in_model if isinstance(layer, NamedLayer) else None
    names = [type(layer).__name__] if in_model is None else [name for name in in_model.names if name]
    return f"layer {index} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
