"""Skip connections: a value that one layer stashes and a later layer pops, without passing the layers between.

    layer --yield stash("x", t)--> Skips --t = yield pop("x")--> layer
                                     |
    plain module: one a thread.      A Pipe: one for each stage and chunk; what another stage pops is a row in the
                                     table of data/values.py, and goes straight from the one to the other

The interface is torchgpipe's (Kim et al. 2020, arXiv 2004.09910, section 3.3), so its models run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar
from uuid import uuid4

from torch import nn

__all__ = ["skippable", "stash", "pop", "Namespace", "verify_skippables"]

T = TypeVar("T")


@dataclass(frozen=True)
class Namespace:
    """Keeps skips of one name apart: see `Skippable.isolate`. A copy is the same namespace."""

    id: str = field(default_factory=lambda: uuid4().hex)


class Key(NamedTuple):
    """The whole name of a skip."""

    namespace: Namespace | None
    name: str

    def __str__(self) -> str:
        return f"skip '{self.name}'"


class stash:
    """The command that stashes: `yield stash(name, value)`.

    Args:
        name: declared in `@skippable(stash=[...])`.
        value: a tensor, None, or any value that may cross stages.
    """

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value


class pop:
    """The command that pops: `value = yield pop(name)`.

    Args:
        name: declared in `@skippable(pop=[...])`.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


Commands: TypeAlias = Generator[Any, Any, Any]


class Skips:
    """The skips that the layers within see, to begin with. What they stash and pop is forgotten at the end.

    What is stashed now is a value of the context (contextvars) that is replaced, never written: code in a copy
    of the context, as `partition` uses to run a layer twice, pops earlier values without an effect outside.
    """

    def __init__(self, values: Iterable[tuple[Key, Any]] = ()) -> None:
        self._values = dict(values)
        self._token: Token[Mapping[Key, Any]] | None = None

    @staticmethod
    def put(key: Key, value: Any) -> None:
        _current.set({**_current.get(), key: value})

    @staticmethod
    def take(key: Key) -> Any:
        """
        Raises:
            RuntimeError: nothing was stashed under this name.
        """
        values = _current.get()
        if key not in values:
            raise RuntimeError(
                f"'{key.name}' has not been stashed. A layer before must `yield stash('{key.name}', ...)`, in the same "
                "namespace."
            )
        _current.set({stashed_key: value for stashed_key, value in values.items() if stashed_key != key})
        return values[key]

    def __enter__(self) -> Skips:
        self._token = _current.set(self._values)
        self._values = {}
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._token is not None  # entered
        _current.reset(self._token)
        self._token = None


# The skips of the stage and chunk that is being computed; outside a Pipe, those of this thread.
_current: ContextVar[Mapping[Key, Any]] = ContextVar("skips", default=MappingProxyType({}))


class Skippable(nn.Module):
    """The base of what `skippable` makes. The decorated module is its child `module`."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def isolate(self, namespace: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Put skips of this layer into a namespace, so that other layers may use the same names.

        Args:
            namespace: the same one for the layer that stashes and the layer that pops.
            only: which skips; None: all that this layer declares.

        Returns:
            This layer.

        Raises:
            ValueError: a name in `only` is none that this layer declares.
        """
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else frozenset(only)
        if not names <= declared:
            unknown = ", ".join(repr(name) for name in sorted(names - declared))
            raise ValueError(f"isolate: {unknown} is not declared by this layer, which has {sorted(declared)}.")
        self.namespaces.update(dict.fromkeys(names, namespace))
        return self

    def stashable(self) -> list[Key]:
        """The names that this layer stashes."""
        return [self._key(name) for name in sorted(self.stashable_names)]

    def poppable(self) -> list[Key]:
        """The names that this layer pops."""
        return [self._key(name) for name in sorted(self.poppable_names)]

    def _key(self, name: str) -> Key:
        return Key(self.namespaces.get(name), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decorated module, and do what it asks for.

        Raises:
            RuntimeError: a name that is not declared, not stashed before, popped twice, or declared and then left out.
            TypeError: the module yielded something else than stash or pop.
        """
        commands = self.module(*args, **kwargs)
        if not isinstance(commands, Generator):  # a forward that yields nothing
            self._check_done(set(), set())
            return commands
        stashed: dict[str, Any] = {}
        popped: set[str] = set()
        try:
            command = next(commands)
            while True:
                command = commands.send(self._obey(command, stashed, popped))
        except StopIteration as stop:
            self._check_done(set(stashed), popped)
            for name, value in stashed.items():
                Skips.put(self._key(name), value)
            return stop.value

    def _obey(self, command: Any, stashed: dict[str, Any], popped: set[str]) -> Any:
        if isinstance(command, stash):
            if command.name not in self.stashable_names:
                raise RuntimeError(
                    f"'{command.name}' has not been declared as stashable. Declare it: @skippable(stash=[...])."
                )
            stashed[command.name] = command.value
            return None
        if isinstance(command, pop):
            if command.name not in self.poppable_names:
                raise RuntimeError(
                    f"'{command.name}' has not been declared as poppable. Declare it: @skippable(pop=[...])."
                )
            if command.name in popped:
                raise RuntimeError(f"'{command.name}' has been popped twice. A skip is popped once: keep its value.")
            popped.add(command.name)
            return Skips.take(self._key(command.name))
        raise TypeError(f"{command!r} is not a command of @skippable. Yield stash(name, value) or pop(name).")

    def _check_done(self, stashed: set[str], popped: set[str]) -> None:
        for names, done, verb in (
            (self.stashable_names, stashed, "stashed"), (self.poppable_names, popped, "popped")
        ):
            missing = ", ".join(repr(name) for name in sorted(names - done))
            if missing:
                raise RuntimeError(f"{missing} must be {verb} but has not been. A layer does all that it declares.")


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorate a module class whose forward stashes and pops. It works in a plain `nn.Sequential` too.

    Args:
        stash: names that its forward stashes.
        pop: names that its forward pops.

    Returns:
        A decorator. What it makes is a module class with the same arguments, whose child `module` is the decorated one.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline import Pipe
        >>> from pipeline.skip import pop, skippable, stash
        >>> @skippable(stash=["early"])
        ... class Split(nn.Module):
        ...     def forward(self, x):
        ...         yield stash("early", x)
        ...         return 2 * x
        >>> @skippable(pop=["early"])
        ... class Add(nn.Module):
        ...     def forward(self, x):
        ...         early = yield pop("early")
        ...         return x + early
        >>> model = nn.Sequential(Split(), nn.Identity(), Add())
        >>> model(torch.ones(4)), Pipe(model, [1, 1, 1], chunks=2)(torch.ones(4))
        (tensor([3., 3., 3., 3.]), tensor([3., 3., 3., 3.]))
    """
    names = {"stashable_names": frozenset(stash), "poppable_names": frozenset(pop)}

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        attributes = {"__module__": module_cls.__module__, "__qualname__": module_cls.__qualname__}
        return type(module_cls.__name__, (Skippable,), {"module_cls": module_cls, **names, **attributes})

    return decorate


# ------------------------------------------------------------------------------------------------- the whole module


class SkipScope(nn.Module):
    """A module whose skips stay within it."""


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip is stashed once and popped once, later. Pipe does so by itself.

    Args:
        module: the Sequential; skippable layers may be nested in its layers.

    Raises:
        TypeError: some do not match; all of them are in the message.

    Example:
        >>> from torch import nn
        >>> from pipeline.skip import skippable, verify_skippables
        >>> @skippable(stash=["early"])
        ... class Split(nn.Module): ...
        >>> verify_skippables(nn.Sequential(Split()))
        Traceback (most recent call last):
            ...
        TypeError: one or more pairs of stash and pop do not match:
        <BLANKLINE>
        * no module declared 'early' as poppable but stashed (by '0')
        <BLANKLINE>
        Give each name one layer that stashes it and one later layer that pops it, or keep pairs apart: .isolate(ns).
    """
    stashed: dict[Key, str] = {}
    popped: set[Key] = set()
    faults: list[str] = []
    for path, layer in within_scope(module, Skippable):
        ambiguous = layer.stashable_names & layer.poppable_names
        faults += [f"'{path}' declared '{name}' both as stashable and as poppable" for name in sorted(ambiguous)]
        for key in layer.stashable():
            if key.name not in ambiguous and stashed.setdefault(key, path) != path:
                faults.append(f"'{path}' redeclared '{key.name}' as stashable but not isolated by namespace")
        for key in layer.poppable():
            if key.name in ambiguous:
                continue
            if key in popped:
                faults.append(f"'{path}' redeclared '{key.name}' as poppable but not isolated by namespace")
            elif key not in stashed:
                faults.append(f"'{path}' declared '{key.name}' as poppable but it was not stashed")
            popped.add(key)
    for key, path in stashed.items():
        if key not in popped:
            faults.append(f"no module declared '{key.name}' as poppable but stashed (by '{path}')")
    if faults:
        raise TypeError(
            "one or more pairs of stash and pop do not match:\n\n" + "\n".join(f"* {fault}" for fault in faults) +
            "\n\nGive each name one layer that stashes it and one later layer that pops it, or keep pairs apart: "
            ".isolate(ns)."
        )


def routes(stages: Iterable[Iterable[nn.Module]]) -> list[tuple[Key, int, int]]:
    """Each skip that crosses stages: (its key, the stage that stashes it, the stage that pops it)."""
    stashed: dict[Key, int] = {}
    crossing = []
    for index, layers in enumerate(stages):
        for layer in layers:
            for _, skippable_layer in within_scope(layer, Skippable):
                crossing += [(key, stashed[key], index) for key in skippable_layer.poppable() if stashed[key] != index]
                stashed.update(dict.fromkeys(skippable_layer.stashable(), index))
    return crossing


def within_scope(module: nn.Module, kind: type[T], path: str = "") -> Iterator[tuple[str, T]]:
    """The modules of a kind in a module, in their order, with their paths: not those in a nested Pipe.

    Of an nn.Sequential one that stands twice, twice.
    """
    if isinstance(module, SkipScope):
        return
    if isinstance(module, kind):
        yield path, module
    for name, child in module.named_children() if not isinstance(module, nn.Sequential) else module._modules.items():
        if child is not None:
            yield from within_scope(child, kind, f"{path}.{name}" if path else name)
