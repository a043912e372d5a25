"""Activation checkpointing of any model's blocks, without a Pipe: they are computed again in the backward.

    checkpoint_blocks(model, Block)
        walk: children before parents, each module once --match--> blocks --every k-th--> block.forward = _Patch
        block(x)    gradients on: `replayed` (replay.py) keeps the inputs, drops the rest      off: the forward itself
        remove()    every block has its own forward again, every config its use_cache

No module is wrapped or replaced, so classes, parameter names and state_dict keys stay.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.lazy import LazyModuleMixin

from partition.modes import modes_of
from pipeline.common.arguments import check_count, check_flags, shown
from pipeline.common.cadence import Cadence
from pipeline.common.interrupts import DeferredSignals
from pipeline.common.module_tables import children_first, modules_of
from pipeline.common.torch_modes import eagerly
from pipeline.recompute.policy import is_checkpointing
from pipeline.recompute.replay import replayed
from pipeline.recompute.snapshot import StageTraits

BlockType: TypeAlias = type[nn.Module] | str
Match: TypeAlias = BlockType | tuple[BlockType, ...] | Callable[[str, nn.Module], object]
_CACHES = "transformers.cache_utils"  # the module of their classes


def checkpoint_blocks(model: nn.Module, match: Match, every: int = 1, nested: bool = False) -> CheckpointedBlocks:
    """Checkpoint the blocks of any model: keep their inputs in a forward, compute the rest again in the backward.

    Outputs, gradients of every order, buffers and the states of all random generators are those of the model without
    it. It is on iff gradients are (`torch.is_grad_enabled()`), in train and in eval mode; within torch.func and forward
    mode the blocks compute as usual. A second call changes nothing more. Where a model of Hugging Face has a
    `config.use_cache` that is on, it is turned off.

    Args:
        model: any module; its blocks get another `forward`, as an attribute of the instance.
        match: which modules are blocks: a class, the name of a class (its own or a base's), a tuple of these, or a
            callable (name, module) -> whether it is one.
        every: of the blocks that match, children before parents, the k-th, the 2k-th, ... are checkpointed.
        nested: allow a block within another, or within a chunk that a Pipe computes again. Each such block is
            computed once more for each level around it.

    Returns:
        The blocks: `remove()` gives them their own forward again, as does the end of a `with`.

    Raises:
        TypeError: `match` is none of these.
        ValueError: no module matches; `every` is no positive integer, or more than what matches; blocks are nested; the
            model's own gradient checkpointing is on.

    Example:
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        >>> blocks = checkpoint_blocks(model, lambda name, module: name in ("0", "1", "2"))
        >>> blocks.names
        ('0', '1', '2')
        >>> model(torch.randn(2, 4)).sum().backward()
        >>> blocks.remove()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {shown(model)}. Give an nn.Module.")
    check_flags(nested=nested)
    every = check_count("every", every)
    _refuse_own_checkpointing(model, modules_of([model]))
    modules = list(children_first(model))
    matching = [(name, module) for name, module in modules if _matches(match, name, module)]
    if not matching:
        raise ValueError(_nothing_matches(match, modules))
    chosen = matching[every - 1 :: every]
    if not chosen:
        count = len(matching)
        raise ValueError(f"every is {every}, but only {count} modules match. Use every={count} or less.")
    for name, block in chosen:
        if any(isinstance(part, torch.jit.ScriptModule) for part in block.modules()):
            raise TypeError(
                f"block '{name}' is, or holds, a module that torch.jit has compiled, and torch's checkpoint cannot "
                "tell what that saved. Leave it uncompiled, checkpoint other blocks, or use a Pipe, which can."
            )
    if not nested:
        _refuse_nesting(modules, chosen)
    configs = _turn_caches_off(model)
    new_blocks = [(name, block) for name, block in chosen if (patch := _patch_of(block)) is None or not patch.is_owned]
    return CheckpointedBlocks([(name, _owned_patch(block, name, nested, configs)) for name, block in new_blocks])


class CheckpointedBlocks:
    """The blocks that one call of `checkpoint_blocks` checkpoints.

    Attributes:
        names: their names in the model. Blocks of an earlier call are not among them.
    """

    def __init__(self, patches: Sequence[tuple[str, _Patch]]) -> None:
        self.names = tuple([name for name, _ in patches])
        self._patches = [patch for _, patch in patches]

    def remove(self) -> None:
        """Give every block its own forward again. A second call does nothing more.

        Raises:
            RuntimeError: something else has replaced the forward of a block since.
        """
        for patch in self._patches:
            patch.check_removable()
        while self._patches:
            self._patches.pop().remove()

    def __enter__(self) -> CheckpointedBlocks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"CheckpointedBlocks({', '.join(self.names)})"


class _Patch:
    """The `forward` of a checkpointed block.

    A copy of the block gets a patch of its own: the original patch would compute with the original's weights.
    The block holds its patch, which refers to it weakly, so that a model is freed with its last reference.
    """

    def __init__(
        self, block: nn.Module, own_forward: dict[str, Any], name: str, nested: bool, configs: list[Any]
    ) -> None:
        self._block = ref(block)
        self._own_forward = own_forward  # the block's own forward, if that was an attribute of the instance
        self._name = name
        self._nested = nested
        self._configs = configs
        self.is_owned = False  # by a CheckpointedBlocks, which can remove it
        self._traits = StageTraits()
        self._cadence = Cadence()  # by training flags

    def __reduce__(self) -> tuple[type[_Patch], tuple[Any, ...]]:
        """For deepcopy and pickle: the patch is copied with the block, and refers to the copy."""
        return _Patch, (self.block, self._own_forward, self._name, self._nested, self._configs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not _is_transformed():
            return eagerly(_Patch.replay, self, args, kwargs)
        return self.__wrapped__(*args, **kwargs)

    @property
    def block(self) -> nn.Module:
        block = self._block()
        if block is None:
            raise ReferenceError(f"the checkpointed block '{self._name}' is gone, but its forward was called.")
        return block

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward without checkpointing; under this name, `inspect.signature` finds its parameters."""
        if self._own_forward:
            return self._own_forward["forward"]  # type: ignore[no-any-return]
        return type(self.block).forward.__get__(self.block)  # type: ignore[no-any-return]

    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = self.block
        description = f"block '{self._name}' ({type(block).__name__})"
        if is_checkpointing() and not self._nested:
            raise RuntimeError(
                f"{description} is checkpointed, and runs within a forward that is checkpointed already (a block "
                "around it, or a Pipe). Use checkpoint='never' in the Pipe, checkpoint one of the two, or allow it "
                "with checkpoint_blocks(..., nested=True) at the cost of one more forward."
            )
        modules = modules_of([block])
        if any([isinstance(module, LazyModuleMixin) and module.has_uninitialized_params() for module in modules]):
            return self.__wrapped__(*args, **kwargs)  # their first forward, which gives them their shapes
        _refuse_own_checkpointing(block, modules)
        _refuse_caches(description, (*args, *kwargs.values()))
        compares = self._cadence.next(modes_of(modules))
        with DeferredSignals():
            return replayed(modules, self.__wrapped__, description, self._traits, compares, args, kwargs)

    def check_removable(self) -> None:
        if _patch_of(self.block) is not self:
            raise RuntimeError(
                f"the forward of block '{self._name}' was replaced after checkpoint_blocks. Undo that first, then "
                "remove()."
            )

    def remove(self) -> None:
        attributes = vars(self.block)
        del attributes["forward"]
        attributes.update(self._own_forward)
        for config in self._configs:
            config.use_cache = True


def _is_transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) or forward mode is on: without hooks of saved tensors nothing is dropped."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _owned_patch(block: nn.Module, name: str, nested: bool, configs: list[Any]) -> _Patch:
    """The patch of a block, a new one or one that was copied with the model. The caller can remove it."""
    patch = _patch_of(block)
    if patch is None:
        own_forward = {"forward": vars(block)["forward"]} if "forward" in vars(block) else {}
        patch = _Patch(block, own_forward, name, nested, configs)
        vars(block)["forward"] = patch
    patch.is_owned = True
    return patch


def _patch_of(module: nn.Module) -> _Patch | None:
    forward = vars(module).get("forward")
    return forward if isinstance(forward, _Patch) else None


def _matches(match: Match, name: str, module: nn.Module) -> bool:
    if isinstance(match, (type, str, tuple, nn.Module)) or not callable(match):
        return any([_is_kind(kind, module) for kind in (match if isinstance(match, tuple) else (match,))])
    return bool(match(name, module))


def _is_kind(kind: object, module: nn.Module) -> bool:
    if isinstance(kind, str):
        return kind in [base.__name__ for base in type(module).__mro__]
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        return isinstance(module, kind)
    raise TypeError(
        f"match is {kind!r}. Use a module class, its name, a tuple of these, or a callable (name, module) -> bool."
    )


def _nothing_matches(match: Match, modules: Sequence[tuple[str, nn.Module]]) -> str:
    kinds = match if isinstance(match, tuple) else (match,)
    wanted = [kind if isinstance(kind, str) else getattr(kind, "__name__", repr(kind)) for kind in kinds]
    classes = sorted({type(module).__name__ for _, module in modules})
    near = [name for wanted_name in wanted for name in difflib.get_close_matches(wanted_name, classes, n=3, cutoff=0.4)]
    return (
        f"no module matches {', '.join(wanted)}. {'Near names' if near else 'The classes'} in this model: "
        f"{', '.join(dict.fromkeys(near) or classes)}."
    )


def _refuse_nesting(modules: Sequence[tuple[str, nn.Module]], chosen: Sequence[tuple[str, nn.Module]]) -> None:
    names = {id(module): name for name, module in modules}
    blocks = {id(block): block for _, block in chosen}
    blocks.update({id(module): module for _, module in modules if _patch_of(module) is not None})
    for outer in blocks.values():
        for inner in outer.modules():
            if inner is not outer and id(inner) in blocks:
                raise ValueError(
                    f"block '{names[id(inner)]}' ({type(inner).__name__}) is within block '{names[id(outer)]}' "
                    f"({type(outer).__name__}), and both would be checkpointed. Match one of the two, or allow it "
                    "with nested=True at the cost of one more forward of the inner one."
                )


def _refuse_own_checkpointing(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    if any([vars(module).get("gradient_checkpointing") is True for module in modules]):
        raise ValueError(
            f"the gradient checkpointing of {type(model).__name__} itself is on: its blocks would be checkpointed "
            "twice. Turn it off first (model.activation_checkpointing_disable(), in older versions of transformers "
            "model.gradient_checkpointing_disable()), or do not use checkpoint_blocks."
        )


def _refuse_caches(description: str, values: Sequence[Any]) -> None:
    caches = [value for value in values if _is_cache(type(value))]  # type: ignore[arg-type]  # a type is Hashable
    if caches:
        raise ValueError(
            f"{description} is checkpointed, and was given a cache of keys and values ({type(caches[0]).__name__}), to "
            "which it would append once more when it is recomputed. Call the model with use_cache=False and without "
            "past_key_values, or under torch.no_grad()."
        )


@lru_cache(maxsize=1024)
def _is_cache(kind: type) -> bool:
    return any([_CACHES == base.__module__ for base in kind.__mro__])


def _turn_caches_off(model: nn.Module) -> list[Any]:
    """Blocks append to a cache of keys and values, and would do so again. Returns the configs that had one."""
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    on = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in on:
        config.use_cache = False
    return on
