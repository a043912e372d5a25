"""The input of a call, from its arguments: one value, or the arguments of a model's own forward.

    pipe(x)                x                 any Pipe
    pipe(ids, mask)        (ids, mask)       one whose model `to_sequential` has cut for such inputs
    pipe(**batch)          {"input_ids": ids, "attention_mask": mask}                      the same
    pipe(batch)            the same, of any mapping, such as a tokenizer's BatchEncoding   the same
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from partition.models.parts import Beginning


def takes_arguments(layers: Sequence[nn.Module]) -> bool:
    """Whether the first of some layers takes the arguments of a model's forward."""
    first = layers[0]
    while isinstance(first, nn.Sequential) and len(first):
        first = first[0]
    return isinstance(first, Beginning)


def input_of(positional: Sequence[Any], named: Mapping[str, Any], arguments: bool) -> Any:
    """The input of a call.

    Args:
        positional: by position.
        named: by name.
        arguments: whether the first layer takes the arguments of a model's forward.

    Raises:
        TypeError: there is none, or several where the first layer takes one.
    """
    if not named and len(positional) == 1:
        (value,) = positional
        return dict(value) if arguments and isinstance(value, Mapping) else value
    if not positional and list(named) == ["input"] and not arguments:  # an nn.Sequential's own name for it
        return named["input"]
    if not positional and not named:
        raise TypeError("a Pipe is called with its input: pipe(x).")
    if not arguments:
        words = f"{len(positional)} inputs" if positional else ", ".join(f"{name}=" for name in named)
        whole, kind = ("(x, y)", "a tuple") if positional else ("{" + f"{next(iter(named))!r}: ..." + "}", "a dict")
        raise TypeError(
            f"the Pipe was called with {words}, but the first layer of an nn.Sequential takes one value. "
            f"pipe({whole}) hands it {kind}; a model whose forward takes several arguments is cut by "
            "Pipe(model, sample=...)."
        )
    if positional and named:
        raise TypeError(
            f"the Pipe was called with {len(positional)} inputs by position and with {', '.join(named)} by name. Give "
            "all of them as the model's sample had them."
        )
    return tuple(positional) if positional else dict(named)
