"""The inputs of a model: what it is called with, and of which the numbers travel to all its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_is_leaf, tree_iter, tree_map_only, tree_unflatten

from partition.errors import PartitionError
from partition.models.shapes import poison

Leaves: TypeAlias = list[Any]


class UnlikeSampleError(PartitionError):
    """A call that takes another way through the model's forward than the sample did.

    Args:
        difference: in words that "on the sample" ends.
        remedy: sentences; what to do instead of another sample.
    """

    def __init__(self, difference: str, remedy: str = "") -> None:
        super().__init__(
            f"{difference} on the sample by which the model was cut. {remedy}Cut it with a sample like this call."
        )


class UnsentInputError(UnlikeSampleError):
    """The numbers of an input are read where they have not been sent.

    Attributes:
        leaf: which input.
    """

    def __init__(self, leaf: int, name: str, operation: str) -> None:
        super().__init__(
            f"{name} is read after the beginning of the model ({operation}), where its numbers are not: it was not read"
        )
        self.leaf = leaf


class UnsentInput(Tensor):
    """An input of which only the shape has been sent, since its numbers are not read. Reading them is an error."""

    _leaf: int
    _name: str

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, leaf: int, name: str
    ) -> UnsentInput:
        tensor: UnsentInput = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        tensor._leaf, tensor._name = leaf, name
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is not annotated
        return f"UnsentInput({self._name}, {tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:  # torch's dispatches nothing
        raise UnsentInputError(self._leaf, self._name, "tolist")

    def numpy(self, **_: Any) -> Any:
        raise UnsentInputError(self._leaf, self._name, "numpy")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if func.is_view or name in _CASTS:  # of its first argument
            unsent = args[0]
            on_meta = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
            result = func(poison(unsent, torch.device("meta")), *args[1:], **on_meta)
            rest = kwargs.get("device") or unsent.device, unsent._leaf, unsent._name
            return tree_map_only(Tensor, lambda part: UnsentInput(part.shape, part.dtype, *rest), result)
        if not name.startswith("new_") and not name.endswith("_like"):
            unsent = next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, UnsentInput))
            raise UnsentInputError(unsent._leaf, unsent._name, name)
        args, kwargs = tree_map_only(UnsentInput, lambda leaf: poison(leaf, leaf.device), (args, kwargs))
        return func(*args, **kwargs)


_CASTS = frozenset({"_to_copy", "clone", "detach", "alias", "lift_fresh"})


class ModelInputs(NamedTuple):
    """The inputs of the model.

    Attributes:
        names: the keyword arguments; None: one positional argument, or a tuple of them.
        tree: of the arguments.
        always: keyword arguments beside them.
        read: for each leaf whether what follows the first block reads its numbers.
        written: for each leaf whether the model's own forward writes it: each part has a copy.
    """

    names: tuple[str, ...] | None
    tree: TreeSpec
    always: Mapping[str, Any]
    read: tuple[bool, ...]
    written: tuple[bool, ...]

    def leaves(self, x: Any) -> Leaves:
        """The leaves of an input like the sample.

        Raises:
            PartitionError: it is not like it.
        """
        x = dict(x) if self.names is not None and isinstance(x, Mapping) else x
        for given in (x, (x,)):  # pipe(x) is as the sample (x,)
            with suppress(ValueError):
                leaves = self.tree.flatten_up_to(given)
                if all(map(tree_is_leaf, leaves)):
                    return leaves
        tree = tree_flatten(dict(x) if isinstance(x, Mapping) else x)[1]
        differing = list(_differing(self.tree, tree, "")) if _are_alike(self.tree, tree) else []
        raise PartitionError(
            f"the model was cut for inputs like {_in_words(self.tree)}; it is called with "
            f"{_in_words(tree)}{_listed(differing)}. Call it as with the sample, or cut it with another "
            "sample. Rows are those of tensors: a list with an entry for each row cannot be cut into chunks."
        )

    def called(self, leaves: Leaves) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model's forward."""
        x = tree_unflatten(leaves, self.tree)
        return called_with(x, self.always)

    def travelling(self, leaves: Leaves) -> tuple[Any, ...]:
        """The same, as they travel with the hidden state: of tensors that are not read again the shapes."""
        for number, (leaf, is_read) in enumerate(zip(leaves, self.read, strict=True)):
            if not (is_read or isinstance(leaf, Tensor)):
                raise UnlikeSampleError(f"{self.words(number)} is {leaf!r}, and was a tensor")
        return tuple(
            [leaf if is_read else _shape_and_dtype(leaf) for leaf, is_read in zip(leaves, self.read, strict=True)]
        )

    def arrived(self, travelling: tuple[Any, ...], device: torch.device) -> Leaves:
        """The leaves again."""
        return [
            leaf if is_read else UnsentInput(leaf[0], getattr(torch, leaf[1]), device, number, self.words(number))
            for number, (leaf, is_read) in enumerate(zip(travelling, self.read, strict=True))
        ]  # fmt: skip

    def words(self, number: int) -> str:
        """The name of a leaf, in words."""
        if self.names is None or len(self.names) != len(self.read):
            return f"tensor {number} of the inputs"
        return f"input {self.names[number]!r}"


def called_with(x: Any, always: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a value stands for: keyword arguments, several positional ones, or one."""
    if isinstance(x, Mapping):
        return (), {**x, **always}
    return (x if isinstance(x, tuple) else (x,)), dict(always)


def _shape_and_dtype(leaf: Tensor) -> tuple[tuple[int, ...], str]:
    """The shape and type of a tensor, as they travel."""
    return tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")


def _are_alike(tree: TreeSpec, other: TreeSpec) -> bool:
    """Whether two containers are of one type, and have as many entries, of the same names."""
    is_same = tree.type is other.type and tree.context == other.context
    return is_same and tree.num_children == other.num_children > 0


def _differing(tree: TreeSpec, other: TreeSpec, path: str) -> Iterator[str]:
    """The entries that differ, in words: what each was, and is."""
    if _are_alike(tree, other):
        keys = tree.context if tree.type is dict else range(tree.num_children)
        for key, one, another in zip(keys, tree.children(), other.children(), strict=True):
            yield from _differing(one, another, f"{path}[{key!r}]" if path else str(key))
    elif tree != other:
        name = path if path[:1].isidentifier() else f"number {path}"
        yield f"{name} was {_in_words(tree, 'one value')}, and is {_in_words(other, 'one value')}"


def _listed(differing: Sequence[str]) -> str:
    return f" ({'; '.join(differing[:3])})" if differing else ""


def _in_words(tree: TreeSpec, leaf: str = "one tensor") -> str:
    if tree.is_leaf():
        return leaf
    if tree.type is dict:
        return "a dict of " + (", ".join(map(str, tree.context)) or "nothing")
    return f"a {tree.type.__name__} of {tree.num_children}"
