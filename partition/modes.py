"""The modes, train or eval, of a model and of its parts: both are told one by `train()`, and neither knows the other.

    model.body.eval()     what stands for `body` in a part follows, when the parts run next
    layers.train()        leads the model's own modules, whose code runs in the parts

A part stands for the modules of the model that contain its blocks, and may have a copy of what several parts call.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


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
    found = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, training in found:
            if module.training != training:
                module.train(training)
        for module, training in found:  # where a module's own `train` sets another
            module.training = training


class Modes:
    """The modes of modules of a model, and of what stands for them. A copy has none: its parts are of no model.

    Args:
        model: the model, which is not kept alive. None: that is not known.
        layers: its parts. What is in them, under its names in the model, and is not the model's own stands for that.
    """

    def __init__(self, model: nn.Module | None = None, layers: Iterable[nn.Module] = ()) -> None:
        self._model = None if model is None else weakref.ref(model)
        standing: dict[str, list[nn.Module]] = defaultdict(list)
        for name, module in [(name, module) for layer in layers for name, module in layer.named_modules()]:
            if model is not None and module is not model.get_submodule(name):
                standing[name].append(module)
        self._standing = [] if model is None else [
            _Standing(model.get_submodule(name), modules) for name, modules in standing.items()
        ]  # fmt: skip

    def __reduce__(self) -> tuple[type[Modes], tuple[()]]:
        return Modes, ()

    @property
    def model(self) -> nn.Module | None:
        """The model, as long as it lives."""
        return None if self._model is None else self._model()

    def add(self, module: nn.Module, standing: nn.Module) -> None:
        """Let something stand for a module from now on: a placeholder of what another process has."""
        self._standing.append(_Standing(module, [standing]))

    def follow(self) -> None:
        """Give what stands for modules of the model the modes of these, where they were changed."""
        for each in self._standing:
            each.follow()

    def lead(self, training: bool) -> None:
        """Give the modules of the model the mode that what stands for them was given."""
        for each in self._standing:
            each.lead(training)


class _Standing:
    """Modules that stand for one of a model. They have its mode, or one that they were given since.

    Args:
        module: of the model.
        standing: what stands for it.
    """

    def __init__(self, module: nn.Module, standing: Iterable[nn.Module]) -> None:
        self._module = weakref.ref(module)
        self._standing = [weakref.ref(each) for each in standing]
        self._seen = module.training

    def follow(self) -> None:
        module = self._module()
        if module is None or module.training == self._seen:
            return
        self._seen = module.training
        for each in self._standing:
            standing = each()
            if standing is not None:
                standing.training = module.training

    def lead(self, training: bool) -> None:
        module = self._module()
        if module is not None:
            self._seen = module.training = training
