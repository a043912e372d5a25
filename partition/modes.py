"""The modes, train or eval, of a model and of its parts: both are told one by `train()`, and neither knows the other.

    model.body.eval()     what stands for `body` in a part follows, when the parts run next
    layers.train()        leads the model's own modules, whose code runs in the parts

A part stands for the modules of the model that contain its blocks, and may have a copy of what several parts call.
A model whose own `train` leaves some modules in the other mode (a BatchNorm that stays in eval mode) does so in parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


def mode_of(module: nn.Module) -> bool:
    """Whether a module is in train mode. A frozen one (torch.jit.freeze) has no mode, and computes as in eval mode."""
    return getattr(module, "training", False)


def modes_of(modules: Iterable[nn.Module]) -> tuple[bool, ...]:
    """Whether each of some modules is in train mode.

    Example:
        >>> modes_of([nn.Dropout(), nn.Dropout().eval()])
        (True, False)
    """
    modules = list(modules)
    try:
        return tuple([module.training for module in modules])  # faster than a call for each
    except AttributeError:
        return tuple([mode_of(module) for module in modules])


@contextmanager
def modes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """At the end modules are in the modes in which they were. Their own `train` tells them, since it may do more.

    Args:
        modules: each before what is in it.

    Example:
        >>> module = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with modes_kept(module.modules()):
        ...     _ = module.eval()
        >>> [layer.training for layer in module]
        [True, False]
    """
    modes = [(module, mode_of(module)) for module in modules]
    try:
        yield
    finally:
        _tell(modes)


class Modes:
    """The modes of modules of a model, and of what stands for them.

    Args:
        model: the model, which is not kept alive. None: that is not known, as of a copy of its parts.
        layers: its parts, which are told the modes that it has. What is in them, under its names in the model, and is
            not the model's own stands for that.
    """

    def __init__(self, model: nn.Module | None = None, layers: Iterable[nn.Module] = ()) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._exempt = {} if model is None else _exempt(model)
        self._pairs: list[_ModePair] = []
        for name, module in [(name, module) for layer in layers for name, module in layer.named_modules()]:
            if model is not None and module is not (original := model.get_submodule(name)):
                module.training = mode_of(original)
                self.add(original, module, name)

    def __reduce__(self) -> tuple[type[Modes], tuple[()], dict[str, Any]]:
        return Modes, (), {"_exempt": self._exempt}

    @property
    def model(self) -> nn.Module | None:
        """The model, as long as it lives."""
        return None if self._model is None else self._model()

    def add(self, module: nn.Module, stand_in: nn.Module, name: str = "") -> None:
        """Let something stand for a module from now on: a placeholder of what another process has."""
        self._pairs.append(_ModePair(name, weakref.ref(module), weakref.ref(stand_in), mode_of(module)))

    def follow(self) -> None:
        """Give what stands for modules of the model the modes of these, where they were changed."""
        if any([pair.is_behind for pair in self._pairs]):
            _tell([mode for pair in self._pairs for mode in pair.follow()])

    def tell(self, layers: Iterable[nn.Module], training: bool) -> None:
        """Tell layers their mode, but for what the model's own `train` leaves in the other one."""
        exempt = self._exempt.get(training, ())
        for layer in layers:
            layer.train(training)
            if exempt and getattr(layer, "in_model", None) is not None:  # what is in it has its name in the model
                named_modules = layer.named_modules()
                _tell([(inner, not training if name in exempt else mode_of(inner)) for name, inner in named_modules])

    def lead(self, training: bool) -> None:
        """Give the modules of the model the modes that layers were told."""
        exempt = self._exempt.get(training, ())
        for pair in self._pairs:
            module = pair.module()
            if module is not None:
                pair.last_mode = module.training = training != (pair.name in exempt)


@dataclass
class _ModePair:
    """A module of the model, and what stands for it: that has the mode of this one, or one that it was given since."""

    name: str
    module: weakref.ref[nn.Module]
    stand_in: weakref.ref[nn.Module]
    last_mode: bool  # of the module

    @property
    def is_behind(self) -> bool:
        """Whether the mode of the module was changed."""
        module = self.module()
        return module is not None and mode_of(module) != self.last_mode

    def follow(self) -> Iterator[tuple[nn.Module, bool]]:
        """A copy of the module, and the mode it is to have. What holds other modules has its own at once."""
        module, stand_in, is_behind = self.module(), self.stand_in(), self.is_behind
        if module is not None:
            self.last_mode = mode_of(module)
        if stand_in is not None:
            training = self.last_mode if is_behind else mode_of(stand_in)
            if type(stand_in) is type(module):
                yield stand_in, training
            else:
                stand_in.training = training


def _exempt(model: nn.Module) -> dict[bool, frozenset[str]]:
    """By mode the names of the modules that the model's own `train` leaves in the other one."""
    if all(type(module).train is nn.Module.train for module in model.modules()):
        return {}
    exempt: dict[bool, frozenset[str]] = {}
    with modes_kept(model.modules()):
        for training in (False, True):
            named_modules = model.train(training).named_modules(remove_duplicate=False)
            exempt[training] = frozenset([name for name, module in named_modules if mode_of(module) != training])
    return exempt


def _tell(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Give modules their modes, each by its own `train`, which may do more; at the end no other has told them another.

    Args:
        modes: of modules, each before what is in it.
    """
    modes = list(modes)
    for module, training in modes:
        if mode_of(module) != training:
            module.train(training)
    for module, training in modes:
        module.training = training
