"""Stand-ins for the blocks of a model, and for what lies in other parts.

A module that is absent computes nothing: what it returns is nan, of the shape and type that its copy on the meta device
finds, so whatever would need its numbers is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from partition.contents import tensors_in
from partition.errors import PartitionError
from partition.models.as_found import Hook
from partition.models.lost import as_lost, lost
from partition.models.references import renew_references
from partition.models.runs import Switches, this_run
from partition.models.shapes import blank, form_in_memory, poison
from partition.opaque import opaque, remedy, type_name
from partition.randomness import generators_left

# By id of the module and name: the attributes that a forward sets, and the tensors that it writes; and whether copies
# have True there: the first forward alone sets that, since it does something once. transformers registers hooks so.
VolatileAttributes: TypeAlias = "Mapping[tuple[int, str], bool]"


class StandIn:
    """The call of what stands in for a block.

    Args:
        block: the block.
        volatile, copies: as of `copy_that_calls`.
        numbers: its numbers, of all its calls.
        is_shaping: whether it returns more than the hidden state, in another shape than it is called with, say.
        hooks: on what it returns, which hand that to the model's forward.
    """

    def __init__(
        self,
        block: nn.Module,
        volatile: VolatileAttributes,
        copies: dict[int, Any],
        numbers: tuple[int, ...],
        is_shaping: bool,
        hooks: Iterable[Hook] = (),
    ) -> None:
        self._numbers = numbers
        self._absent = AbsentModule(block, volatile) if is_shaping else None
        self._hooks = tuple(hooks)
        self._copy = copy_that_calls(self, block, volatile, copies)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        returned = this_run.get().reach(self._numbers, args, kwargs, self._absent)
        for hook, takes_kwargs in self._hooks:
            given = (args, kwargs, returned) if takes_kwargs else (args, returned)
            replacement = hook(self._copy, *given)
            returned = returned if replacement is None else replacement
        return returned


class AbsentModule:
    """The call of a module that lies in another part: nan, of the shapes that it would return."""

    def __init__(self, module: nn.Module, volatile: VolatileAttributes) -> None:
        values = {
            (id(submodule), key): value for submodule in module.modules() for key, value in vars(submodule).items()
            if (id(submodule), key) in volatile
        }  # fmt: skip
        tables = {key: value for key, value in values.items() if isinstance(value, Tensor)}  # of rotations, say
        dropped = {
            key: is_done for key, is_done in volatile.items() if key not in tables and not _are_plain(values.get(key))
        }  # it may read a number that it has, or an LSTM what its parameters were, and set another
        copies: dict[int, Any] = {}
        self._on_meta = rebuilt(module, lambda tensor: tensor.detach().to("meta"), dropped, copies).eval()
        _take_hooks_apart(self._on_meta)
        for (owner, key), tensor in tables.items():
            if owner in copies:
                vars(copies[owner])[key] = tensor.detach().to("meta")
        self._meta_outputs: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        shapes = [form_in_memory(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        key = repr((tree, shapes, Switches.now().autocast))
        meta_output = self._meta_outputs.get(key)
        if meta_output is None:
            with generators_left({device}):  # what it draws is drawn in the part that has it
                meta_output, follows_from_shapes = self._meta_output(device, leaves, tree)
            for leaf in opaque(tree_leaves(meta_output)):
                if tensors_in(getattr(leaf, "__dict__", leaf)):
                    raise PartitionError(
                        f"a {type(self._on_meta).__name__} returns a {type_name(leaf)} to several parts of the model, "
                        f"and nothing sees what is in it: {remedy(leaf)}."
                    )
            if follows_from_shapes and not opaque(leaves):
                self._meta_outputs[key] = meta_output
                if len(self._meta_outputs) > _MOST_FORMS:
                    del self._meta_outputs[next(iter(self._meta_outputs))]  # the oldest
        return tree_map_only(Tensor, lambda meta: lost(meta, device), meta_output)

    def _meta_output(self, device: torch.device, leaves: Sequence[Any], tree: TreeSpec) -> tuple[Any, bool]:
        """The output of the module, on the meta device, and whether it follows from the shapes of its arguments.

        Autocast does not come there, nor do modules that ask for their device or keep tensors beside their buffers: for
        these, torch's fake tensors stand on the device, which take longer. One whose code asks for numbers gets nan,
        and whole numbers (sizes of images) as they are.
        """
        if not any(is_on for _, is_on, _ in Switches.now().autocast):
            try:
                return self._output_on(torch.device("meta"), leaves, tree), True
            except Exception:
                pass
        reads = False
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                output = self._output_on(device, leaves, tree)
        except RuntimeError:  # it has no numbers: experts that are called for some rows, or a method of numpy's arrays
            reads = any(map(_holds_whole_numbers, leaves))
            try:
                output = self._output_on(device, leaves, tree, poison, keeps_whole=reads)
            except RuntimeError:  # it writes them: it initialises weights by what it takes for its first batch
                output = self._output_on(device, leaves, tree, _writable, keeps_whole=reads)
        return tree_map_only(Tensor, lambda leaf: blank(leaf, torch.device("meta")), output), not reads

    def _output_on(
        self,
        device: torch.device,
        leaves: Sequence[Any],
        tree: TreeSpec,
        made: Callable[[Tensor, torch.device], Tensor] = blank,
        keeps_whole: bool = False,
    ) -> Any:
        leaves = [
            leaf if not isinstance(leaf, Tensor) else
            leaf.clone() if keeps_whole and _holds_whole_numbers(leaf) else made(leaf, device) for leaf in leaves
        ]  # fmt: skip
        args, kwargs = tree_unflatten(leaves, tree)
        module = rebuilt(self._on_meta, lambda tensor: made(tensor, device))
        _take_hooks_apart(module)
        for submodule in module.modules():
            for name, buffer in submodule._buffers.items():
                if buffer is not None:
                    submodule._buffers[name] = buffer.clone()  # with memory for each number, as it may be written
        with torch.no_grad():
            return module(*args, **kwargs)


def _take_hooks_apart(copy: nn.Module) -> None:
    """Give the modules of a copy tables of hooks of their own: a forward may register some, and note that it has."""
    for module in copy.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # is no copy
            tables = {name: table for name, table in vars(module).items() if isinstance(table, dict)}
            vars(module).update({name: table.copy() for name, table in tables.items() if "_hooks" in name})


def copy_that_calls(
    forward: StandIn | AbsentModule, module: nn.Module, volatile: VolatileAttributes, copies: dict[int, Any]
) -> nn.Module:
    """A copy of a module without numbers and hooks, whose call is another. It is added to `copies`: see `rebuilt`."""
    copy = rebuilt(module, without_numbers, volatile, copies)
    no_hooks = {name: table for name, table in vars(nn.Module()).items() if "_hooks" in name}
    vars(copy).update(no_hooks, forward=forward, _compiled_call_impl=forward)  # nor does it call those of all modules
    return copy


def without_numbers(tensor: Tensor) -> Tensor:
    """The stand-in for a tensor that lies in another part."""
    return as_lost(poison(tensor, tensor.device))


def _writable(tensor: Tensor, device: torch.device) -> Tensor:
    """The same, with memory for each number."""
    return poison(tensor, device).clone()


def _holds_whole_numbers(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_floating_point() and not leaf.is_complex()


def rebuilt(
    module: nn.Module,
    changed: Callable[[Tensor], Tensor],
    volatile: VolatileAttributes = MappingProxyType({}),
    copies: dict[int, Any] | None = None,
) -> nn.Module:
    """A copy of a module with other parameters and buffers, without what is `volatile`; it shares all else.

    Args:
        module: the module.
        changed: from a parameter or buffer to the copy's.
        volatile: the attributes that a forward sets.
        copies: by the id of what they stand for; those that are made are added.
    """
    copies = {} if copies is None else copies
    earlier = set(copies)
    copy = copied_module(module, changed, copies, volatile)
    for key in copies.keys() - earlier:
        if isinstance(copies[key], nn.Module):
            renew_references(copies[key], copies)
    return copy


def copied_module(
    module: nn.Module,
    changed: Callable[[Tensor], Tensor],
    copies: dict[int, Any],
    volatile: VolatileAttributes = MappingProxyType({}),
    among: Container[int] | None = None,
) -> nn.Module:
    """A copy of a module, which refers to what that refers to. Of `among`, ids of modules, others are not copied."""
    if id(module) in copies:
        return copies[id(module)]  # type: ignore[no-any-return]  # of a module
    if isinstance(module, torch.jit.ScriptModule) or among is not None and id(module) not in among:
        return module  # a script has no parameters: see `to_sequential`
    copy = copies[id(module)] = shallow(module, volatile)
    for table in (vars(copy)["_parameters"], vars(copy)["_buffers"]):
        for name, tensor in table.items():
            if tensor is not None:
                table[name] = copies[id(tensor)] = changed(tensor)
    for name, child in module._modules.items():
        if child is not None:
            vars(copy)["_modules"][name] = copied_module(child, changed, copies, volatile, among)
    forward: Any = vars(module).get("forward")
    child = copies.get(id(getattr(forward, "__self__", None)), copy)
    if child is not copy:  # its forward is that of a child: of peft's AdaptionPromptModel
        vars(copy)["forward"] = getattr(child, forward.__name__)
    return copy


def shallow(module: nn.Module, volatile: VolatileAttributes = MappingProxyType({})) -> nn.Module:
    """A copy of a module that shares its parameters, buffers and children, in tables of its own."""
    module_copy: nn.Module = object.__new__(type(module))
    attributes = vars(module_copy)
    attributes.update(vars(module))
    for (owner, name), is_done in volatile.items():
        if owner == id(module):
            attributes.pop(name, None)
            if is_done:
                attributes[name] = True
    for table in ("_parameters", "_buffers", "_modules"):
        attributes[table] = attributes[table].copy()
    if not isinstance(attributes.get("forward"), StandIn | AbsentModule):  # it is bound to the other
        for name in ("forward", "_compiled_call_impl"):
            attributes.pop(name, None)
    return module_copy


def _are_plain(value: Any) -> bool:
    return all(leaf is None or isinstance(leaf, bool | int | float | str | ref) for leaf in tree_leaves(value))


_MOST_FORMS = 32  # of arguments for which the form of an output is known
