"""The values that modules return in one run of an outline: noted for later parts, or told where others made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from partition.errors import PartitionError
from partition.models.runs import OutlineRun

_CALL = "_compiled_call_impl"  # what torch calls in place of a module's own `_call_impl`, where there is one


@contextmanager
def caught(run: OutlineRun, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Within: what modules return is noted as the run wants it, and replaced by what it was told.

    A call is caught where torch looks for a compiled one: hooks have run by then, and copies of the module in other
    parts, which have the same tables of hooks, know nothing of it.

    Args:
        run: the run.
        modules: those that it calls, by their first names in the model.

    Raises:
        PartitionError: one that is to be noted is called twice.
    """
    originals = [
        (module, name, vars(module).get(_CALL)) for name, module in {id(pair[1]): pair for pair in modules}.values()
        if name in run.wanted or name in run.returns
    ]  # fmt: skip
    try:
        for module, name, original in originals:
            vars(module)[_CALL] = _catching(run, name, module._call_impl if original is None else original)
        yield
    finally:
        for module, _, original in originals:
            if original is None:
                del vars(module)[_CALL]
            else:
                vars(module)[_CALL] = original


def check_noted(run: OutlineRun) -> None:
    """Raise if a module that is to be noted was not called."""
    for name, places in run.wanted.items():
        if not run.noted.keys() >= {(name, place) for place in places}:
            raise PartitionError(
                f"the model's forward did not call {name!r} before its blocks, as it did on the sample with which it "
                "was cut, and another part reads what it returns. Cut the model with a sample that is like this call."
            )


def _catching(run: OutlineRun, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def catching(*args: Any, **kwargs: Any) -> Any:
        returned = run.with_returns(name, call(*args, **kwargs))
        leaves = tree_leaves(returned)
        for place, copies in run.wanted.get(name, {}).items():
            if (name, place) in run.noted:
                raise PartitionError(
                    f"the model's forward called {name!r} twice, and once on the sample with which it was cut; another "
                    "part reads what it returns. Cut the model with a sample that is like this call."
                )
            run.noted[name, place] = leaves[place].clone() if copies else leaves[place]
        return returned

    return catching
