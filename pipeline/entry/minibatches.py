"""The mini-batches of a call: one, or those that a loader gives, whose chunks run one after the other in one schedule.

    x, target             --cut-->  chunks 0 ... m-1
    (x, target), ...      --cut-->  chunks 0 ... m-1 of the first, m ... 2m-1 of the second, ...

So several mini-batches before one optimizer step need no second rule: they are one mini-batch of all their rows, whose
chunks may differ in shape. Activations are held as the schedule says, and its bubble is paid once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.utils._pytree as pytree
from torch import Tensor

from pipeline.common.call_lock import turn
from pipeline.data.microbatch import Batch, consecutive, scatter, scatter_like
from pipeline.entry.inputs import input_of
from pipeline.entry.runtime import Runtime
from pipeline.entry.settings import Settings

_T = TypeVar("_T")


def is_loader(x: Any) -> bool:
    """Whether x is no mini-batch, but gives mini-batches: an iterator, a DataLoader, no container."""
    return isinstance(x, Iterable) and not isinstance(x, (Tensor, Collection)) and pytree.tree_is_leaf(x)


def pairs(loader: Iterable[Any], target: Any, entry: str) -> Iterator[tuple[Any, Any]]:
    """The pairs (x, target) of a loader.

    Args:
        loader: gives them.
        target: that was given beside it: None.
        entry: the method that it was given to, for errors.

    Raises:
        ValueError: it gives none, or something else; a target is given.
    """
    if target is not None:
        raise ValueError("a target was given beside a loader, whose mini-batches bring their own. Leave it out.")
    number = -1
    for number, item in enumerate(loader):
        yield _pair(item, number, entry)
    if number < 0:
        raise ValueError("the loader gave no mini-batch. Give one that can be gone through again, or look at its data.")


@contextmanager
def noting_pairs(x: Any, target: Any) -> Iterator[None]:
    """Within: an error says that a list is one mini-batch, where x is a list of pairs and there is no target."""
    try:
        yield
    except Exception as error:
        if target is None and isinstance(x, list) and all([isinstance(item, tuple) and len(item) == 2 for item in x]):
            error.add_note("x is a list, which is one mini-batch. If it holds several, (x, target), give iter(x).")
        raise


def read_before(runtime: Runtime, entry: str, read: Callable[[], _T]) -> _T:
    """The mini-batches for a call, from a loader, before the call: a loader may call Pipes, in threads of its own too.

    Args:
        runtime: of the Pipe.
        entry: the name of the call, whose failure this one is.
        read: reads the loader.
    """
    try:
        return read()
    except BaseException:
        with turn(), runtime.communicator(entry):
            raise


def cut_mini_batches(settings: Settings, x: Any, target: Any) -> tuple[Batch, Batch]:
    """Cut a mini-batch, or each of a loader's, and the targets alike.

    Raises:
        ValueError: mini-batches of a loader differ in structure, or require a gradient; see `pairs` and `scatter`.
    """
    if not is_loader(x):
        return _cut(settings, x, target)
    cuts = [_cut(settings, *pair, f" of mini-batch {number}") for number, pair in enumerate(pairs(x, target, "step"))]
    batches, targets = zip(*cuts, strict=True)
    for number, batch in enumerate(batches if len(cuts) > 1 else ()):
        if any([tensor.requires_grad for tensor in batch.tree.tensors]):
            raise ValueError(
                f"x of mini-batch {number} requires a gradient, which a step over several mini-batches does not give. "
                "Make it a parameter of the model, detach it, or take a step without an optimizer for each of them: "
                "pipe.step(x, target, ...) adds to .grad."
            )
    return consecutive(batches, "x"), consecutive(targets, "the target")


def _cut(settings: Settings, x: Any, target: Any, suffix: str = "") -> tuple[Batch, Batch]:
    value = input_of((x,), {}, settings.takes_arguments)
    batch = scatter(value, settings.chunks, "x" + suffix, settings.batch_dim)
    return batch, scatter_like(target, batch, "the target" + suffix)


def _pair(item: Any, number: int, entry: str) -> tuple[Any, Any]:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    description = f"a {type(item).__name__}" + (f" of {len(item)}" if isinstance(item, (tuple, list)) else "")
    raise ValueError(
        f"mini-batch {number} of the loader is {description}. Give pairs (x, target), such as "
        f"pipe.{entry}(((batch['x'], batch['y']) for batch in loader), loss_fn=loss_fn)."
    )
