"""Random generators, those of Python and numpy with the interface of `torch.Generator`.

Their states are read and written where they lie in memory, in a microsecond or two: by their own methods it takes 13
(Python) and 100 (numpy). Where in an object a state lies is found by its values, once. Where it is not found, and for
other bit generators and subclasses, their own methods do it.
"""

from __future__ import annotations

import _random  # the part of random that is written in C: what random.Random.seed comes to
import pickle
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from ctypes import c_char, string_at
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy
import torch

_MASK32 = 0xFFFFFFFF
_STATE = struct.Struct("625I")  # of a Mersenne Twister: 624 words and a position
_NORMAL = struct.Struct("ixxxxd")  # numpy's half of a pair of normal numbers: whether it waits to be drawn, and which


class StatedGenerator(Protocol):
    """A generator whose state can be read and put back."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> object: ...


class Generator(StatedGenerator, Protocol):
    """The interface of a `torch.Generator`, to which Python's and numpy's generators are adapted here."""

    def manual_seed(self, seed: int, /) -> object: ...


States: TypeAlias = list[tuple[StatedGenerator, Any]]


class Bits(NamedTuple):
    """The state of a Mersenne Twister, as it lies in memory.

    Attributes:
        words: in Python the position comes first, in numpy last.
        normal: the half of a pair of normal numbers that waits to be drawn.
    """

    words: bytes
    normal: Any


class PythonGenerator:
    """A `random.Random`; or the module `random`, which is the global one."""

    def __init__(self, generator: Any) -> None:
        self._generator: Any = generator.random.__self__ if generator is random else generator
        is_plain = type(self._generator) is random.Random
        self._memory = _memory(id(self._generator), _PYTHON_OFFSET, _STATE) if is_plain else None
        self._seed: Any = partial(_random.Random.seed, self._generator) if is_plain else self._generator.seed

    def manual_seed(self, seed: int) -> None:
        self._seed(seed)
        self._generator.gauss_next = None

    def get_state(self) -> Any:
        if self._memory is None:
            return self._generator.getstate()
        return Bits(self._memory.raw, self._generator.gauss_next)

    def set_state(self, state: Any) -> None:
        if self._memory is None:
            self._generator.setstate(state)
        else:
            self._memory.raw, self._generator.gauss_next = state


class NumpyGenerator:
    """A `numpy.random.RandomState`; or the module `numpy.random`, which is the global one."""

    def __init__(self, generator: Any) -> None:
        self._generator: Any = generator.mtrand._rand if generator is numpy.random else generator
        is_plain = type(self._generator) is numpy.random.RandomState
        self._normal: Any = _memory(id(self._generator), _NUMPY_OFFSET, _NORMAL) if is_plain else None
        self._bits: Any = None  # whose state is at `_words`
        self._words: Any = None
        self._seed = self._generator.seed

    def manual_seed(self, seed: int) -> None:
        bits: Any = self._generator._bit_generator  # numpy.random.set_bit_generator may have changed that of the global
        if type(bits) is numpy.random.MT19937:
            self._seed(seed & _MASK32)
        else:  # numpy seeds no other anew
            self._generator.set_state(type(bits)(seed).state)

    def get_state(self) -> Any:
        if self._is_readable:
            return Bits(self._words.raw, self._normal.raw)
        return self._generator.get_state(legacy=False)  # in half the time of the legacy one

    def set_state(self, state: Any) -> None:
        if isinstance(state, Bits) and self._is_readable:
            self._words.raw, self._normal.raw = state
        else:
            self._generator.set_state(state)

    @property
    def _is_readable(self) -> bool:
        """Whether the state lies where it was found: the global generator may have got other bits."""
        bits = self._generator._bit_generator
        if bits is not self._bits:
            is_plain = self._normal is not None and type(bits) is numpy.random.MT19937
            self._bits, self._words = bits, _memory(bits.ctypes.state_address, 0, _STATE) if is_plain else None
        return self._words is not None


class NumpyBits:
    """The bit generator of a `numpy.random.Generator`."""

    def __init__(self, generator: numpy.random.BitGenerator) -> None:
        self._generator = generator

    def manual_seed(self, seed: int) -> None:
        kind: Any = type(self._generator)
        self._generator.state = kind(seed).state

    def get_state(self) -> Any:
        return self._generator.state

    def set_state(self, state: Any) -> None:
        self._generator.state = state


def _memory(address: int, offset: int | None, kind: struct.Struct) -> Any:
    """The bytes of a value within an object, to read and to write. None: it was not found."""
    return None if offset is None else (c_char * kind.size).from_address(address + offset)


def _offset_of(generator: object, kind: type, values: bytes) -> int | None:
    """The place of some values in the memory of an object, if they stand there once."""
    memory = string_at(id(generator), kind.__basicsize__)
    return memory.index(values) if memory.count(values) == 1 else None


def _of_python() -> int | None:
    generator = random.Random(0)
    _, words, _ = generator.getstate()
    return _offset_of(generator, random.Random, _STATE.pack(words[-1], *words[:-1]))


def _of_numpy() -> int | None:
    generator = numpy.random.RandomState(0)
    generator.standard_normal()
    state: Any = generator.get_state(legacy=False)
    words = _STATE.pack(*state["state"]["key"], state["state"]["pos"])
    if string_at(generator._bit_generator.ctypes.state_address, _STATE.size) != words:
        return None
    return _offset_of(generator, numpy.random.RandomState, _NORMAL.pack(1, state["gauss"]))


# An id is an address in CPython alone; and there its lock keeps other threads out.
_IS_READABLE = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
_PYTHON_OFFSET, _NUMPY_OFFSET = (_of_python(), _of_numpy()) if _IS_READABLE else (None, None)


OUTSIDE_TORCH: tuple[Generator, ...] = (PythonGenerator(random), NumpyGenerator(numpy.random))
OF_HOST: tuple[Generator, ...] = (torch.default_generator, *OUTSIDE_TORCH)


def same_state(one: Any, other: Any) -> bool:
    """Whether two states of one generator are the same."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other if isinstance(one, Bits) else pickle.dumps(one) == pickle.dumps(other)


def stand_at(states: Iterable[tuple[StatedGenerator, Any]]) -> bool:
    """Whether generators are at these states."""
    return all([same_state(state, generator.get_state()) for generator, state in states])


def generators_among(values: Iterable[Any]) -> dict[int, Generator]:
    """The generators among some values, by id, with the interface of `torch.Generator`.

    They are `torch.Generator`, `random.Random`, `numpy.random.RandomState`, `numpy.random.Generator` objects, and bit
    generators of numpy.
    """
    objects = list(values)
    adapters = {kind: adapter for kind in set(map(type, objects)) if (adapter := _adapter(kind)) is not None}
    generators: dict[int, Generator] = {}
    for value in objects if adapters else ():  # as a rule there are none
        adapter = adapters.get(type(value))
        if adapter is not None:
            generator = value.bit_generator if isinstance(value, numpy.random.Generator) else value
            generators[id(generator)] = adapter(generator)
    return generators


def states_of(generators: Iterable[StatedGenerator]) -> States:
    """Generators, and their present states."""
    return [(generator, generator.get_state()) for generator in generators]


def put_generators_back(states: Iterable[tuple[StatedGenerator, Any]]) -> None:
    """Put generators at earlier states."""
    for generator, state in states:
        generator.set_state(state)


@lru_cache(maxsize=4096)
def _adapter(kind: type) -> Callable[[Any], Generator] | None:
    """The adapter of a class to the interface of `torch.Generator`. None: its objects are no generators."""
    if issubclass(kind, random.SystemRandom):  # it has no state
        return None
    return next((adapter for base, adapter in _ADAPTERS if issubclass(kind, base)), None)


_ADAPTERS: tuple[tuple[type, Callable[[Any], Generator]], ...] = (
    (torch.Generator, lambda generator: generator),
    (random.Random, PythonGenerator),
    (numpy.random.RandomState, NumpyGenerator),
    (numpy.random.Generator, NumpyBits),
    (numpy.random.BitGenerator, NumpyBits),
)
GENERATORS = tuple([kind for kind, _ in _ADAPTERS])


@contextmanager
def generators_at(states: States) -> Iterator[None]:
    """Within: generators are at earlier states; at the end where they were."""
    previous = states_of(generator for generator, _ in states)
    try:
        put_generators_back(states)
        yield
    finally:
        put_generators_back(previous)
