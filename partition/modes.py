"""The modes, train or eval, of a model and of its parts: both are told one by `train()`, and neither knows the other.

    model.body.eval()     what stands for `body` in a part follows, when the parts run next
    layers.train()        leads the model's own modules, whose code runs in the parts

A part stands for the modules of the model that contain its blocks, and may have a copy of what several parts call.
A model whose own `train` leaves some modules in the other mode (a BatchNorm that stays in eval mode) does so in parts.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
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
    modes = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        _tell(modes)


class Modes:
    """The modes of modules of a model, and of what stands for them.

    Args:
        model: the model, which is not kept alive. None: that is not known, as of a copy of its parts.
        layers: its parts. What is in them, under its names in the model, and is not the model's own stands for that.
        exempt: by mode the names of the modules that the model's own `train` leaves in the other one.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        layers: Iterable[nn.Module] = (),
        exempt: Mapping[bool, frozenset[str]] | None = None,
    ) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._exempt = exempt or {}
        stand_ins: dict[str, list[nn.Module]] = defaultdict(list)
        for name, module in [(name, module) for layer in layers for name, module in layer.named_modules()]:
            if model is not None and module is not model.get_submodule(name):
                stand_ins[name].append(module)
        self._groups = [] if model is None else [
            _ModeGroup(name, model.get_submodule(name), modules) for name, modules in stand_ins.items()
        ]  # fmt: skip

    @classmethod
    def of(cls, model: nn.Module, layers: Iterable[nn.Module]) -> Modes:
        """Those of a model and its parts, which are told the modes that it has."""
        layers = list(layers)
        for name, module in [(name, module) for layer in layers for name, module in layer.named_modules()]:
            module.training = model.get_submodule(name).training
        return cls(model, layers, _exempt(model))

    def __reduce__(self) -> tuple[type[Modes], tuple[None, tuple[()], Mapping[bool, frozenset[str]]]]:
        return Modes, (None, (), self._exempt)

    @property
    def model(self) -> nn.Module | None:
        """The model, as long as it lives."""
        return None if self._model is None else self._model()

    def add(self, module: nn.Module, stand_in: nn.Module) -> None:
        """Let something stand for a module from now on: a placeholder of what another process has."""
        self._groups.append(_ModeGroup("", module, [stand_in]))

    def follow(self) -> None:
        """Give what stands for modules of the model the modes of these, where they were changed."""
        if any([group.is_behind for group in self._groups]):
            _tell([pair for group in self._groups for pair in group.follow()])

    def tell(self, layers: Iterable[nn.Module], training: bool) -> None:
        """Tell layers their mode, but for what the model's own `train` leaves in the other one."""
        exempt = self._exempt.get(training, ())
        for layer in layers:
            layer.train(training)
            if exempt and getattr(layer, "in_model", None) is not None:  # what is in it has its name in the model
                named_modules = layer.named_modules()
                _tell([(inner, not training if name in exempt else inner.training) for name, inner in named_modules])

    def lead(self, training: bool) -> None:
        """Give the modules of the model the modes that layers were told."""
        exempt = self._exempt.get(training, ())
        for group in self._groups:
            group.lead(training != (group.name in exempt))


class _ModeGroup:
    """Modules that stand for one of a model. They have its mode, or one that they were given since.

    Args:
        name: of the module.
        module: of the model.
        stand_ins: what stands for it.
    """

    def __init__(self, name: str, module: nn.Module, stand_ins: Iterable[nn.Module]) -> None:
        self.name = name
        self._module = weakref.ref(module)
        self._stand_ins = [weakref.ref(stand_in) for stand_in in stand_ins]
        self._last_mode = module.training

    @property
    def is_behind(self) -> bool:
        """Whether the mode of the module was changed."""
        module = self._module()
        return module is not None and module.training != self._last_mode

    def follow(self) -> list[tuple[nn.Module, bool]]:
        """The copies of the module, and the modes they are to have. What holds other modules has its own at once."""
        module, is_behind = self._module(), self.is_behind
        if module is not None:
            self._last_mode = module.training
        copies = []
        for stand_in in [stand_in for reference in self._stand_ins if (stand_in := reference()) is not None]:
            training = self._last_mode if is_behind else stand_in.training
            if type(stand_in) is type(module):
                copies.append((stand_in, training))
            else:
                stand_in.training = training
        return copies

    def lead(self, training: bool) -> None:
        """Give the module the mode that what stands for it was told."""
        module = self._module()
        if module is not None:
            self._last_mode = module.training = training


def _exempt(model: nn.Module) -> dict[bool, frozenset[str]]:
    if all(type(module).train is nn.Module.train for module in model.modules()):
        return {}
    exempt: dict[bool, frozenset[str]] = {}
    with modes_kept(model.modules()):
        for training in (False, True):
            named_modules = model.train(training).named_modules(remove_duplicate=False)
            exempt[training] = frozenset([name for name, module in named_modules if module.training != training])
    return exempt


def _tell(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Give modules their modes, each by its own `train`, which may do more; at the end no other has told them another.

    Args:
        modes: of modules, each before what is in it.
    """
    modes = list(modes)
    for module, training in modes:
        if module.training != training:
            module.train(training)
    for module, training in modes:
        module.training = training
