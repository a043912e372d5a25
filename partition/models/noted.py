"""What modules return while a part runs, noted for the parts that read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from partition.errors import PartitionError
from partition.models.outline import Outline
from partition.models.passing import Return
from partition.models.runs import Chain

_CALL = "_compiled_call_impl"  # what torch calls instead of a module's own `_call_impl`, where there is one


class Noted:
    """Within: what modules before a chain return is noted. A context, whose value has it by its slot.

    A call is caught where torch looks for a compiled one, so that hooks have run, and copies of the module in other
    parts, whose tables of hooks are the same, know nothing of it.

    Args:
        outline: of the model.
        chain: the blocks before which they are called.
        own: the modules and parameters that the part has, by their names in the model.
    """

    def __init__(self, outline: Outline, chain: Chain, own: Mapping[str, Any]) -> None:
        self._wanted = outline.passing.noted(chain.first)
        names = [name for name in own if outline.first_names.get(name) in self._wanted]
        self._modules = {id(own[name]): (own[name], outline.first_names[name]) for name in names}
        self._found: list[tuple[nn.Module, Any]] = []
        self._noted: dict[Return, Any] = {}

    def __enter__(self) -> Mapping[Return, Any]:
        for module, name in self._modules.values():
            found = vars(module).get(_CALL)
            self._found.append((module, found))
            vars(module)[_CALL] = self._noting(name, module._call_impl if found is None else found)
        return self._noted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module, found in self._found:
            if found is None:
                del vars(module)[_CALL]
            else:
                vars(module)[_CALL] = found
        missing = [name for name in self._wanted if not any(each.name == name for each in self._noted)]
        if missing and error is None:
            raise PartitionError(
                f"the model's forward did not call {missing[0]!r} before its blocks, as it did on the sample with "
                "which it was cut, and another part reads what it returns. Cut the model with a sample that is like "
                "this call."
            )

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            returned = call(*args, **kwargs)
            leaves = tree_leaves(returned)
            for place, copies in self._wanted[name].items():
                if Return(name, place) in self._noted:
                    raise PartitionError(
                        f"the model's forward called {name!r} twice, and once on the sample with which it was cut; "
                        "another part reads what it returns. Cut the model with a sample that is like this call."
                    )
                self._noted[Return(name, place)] = leaves[place].clone() if copies else leaves[place]
            return returned

        return noting
