"""Python's and numpy's generators, with the interface of `torch.Generator`.

Their states are read and written where they lie in memory, in a microsecond or two: by their own methods it takes 13
(Python) and 100 (numpy). Where in an object a state lies is found by its values, once. Where it is not found, and for
other bit generators and subclasses, their own methods do it.
"""

from __future__ import annotations

import _random  # the part of random that is written in C: what random.Random.seed comes to
import random
import struct
import sys
from ctypes import memmove, string_at
from functools import partial
from typing import Any, NamedTuple

import numpy

_MASK32 = 0xFFFFFFFF
_STATE = struct.Struct("625I")  # of a Mersenne Twister: 624 words and a position
_NORMAL = struct.Struct("ixxxxd")  # numpy's half of a pair of normal numbers: whether it waits to be drawn, and which


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
        self._address = id(self._generator) + _PYTHON_OFFSET if _PYTHON_OFFSET and is_plain else None
        self._seed: Any = partial(_random.Random.seed, self._generator) if is_plain else self._generator.seed

    def manual_seed(self, seed: int) -> None:
        self._seed(seed)
        self._generator.gauss_next = None

    def get_state(self) -> Any:
        if self._address is None:
            return self._generator.getstate()
        return Bits(string_at(self._address, _STATE.size), self._generator.gauss_next)

    def set_state(self, state: Any) -> None:
        if self._address is None:
            self._generator.setstate(state)
        else:
            memmove(self._address, state.words, _STATE.size)
            self._generator.gauss_next = state.normal


class NumpyGenerator:
    """A `numpy.random.RandomState`; or the module `numpy.random`, which is the global one."""

    def __init__(self, generator: Any) -> None:
        self._generator: Any = generator.mtrand._rand if generator is numpy.random else generator
        is_plain = type(self._generator) is numpy.random.RandomState
        self._address = id(self._generator) + _NUMPY_OFFSET if _NUMPY_OFFSET and is_plain else None
        self._seed = self._generator.seed

    def manual_seed(self, seed: int) -> None:
        bits: Any = self._generator._bit_generator  # numpy.random.set_bit_generator may have changed that of the global
        if type(bits) is numpy.random.MT19937:
            self._seed(seed & _MASK32)
        else:  # numpy seeds no other anew
            self._generator.set_state(type(bits)(seed).state)

    def get_state(self) -> Any:
        bits = self._generator._bit_generator
        if self._address is None or type(bits) is not numpy.random.MT19937:
            return self._generator.get_state(legacy=False)  # in half the time
        return Bits(string_at(bits.ctypes.state_address, _STATE.size), string_at(self._address, _NORMAL.size))

    def set_state(self, state: Any) -> None:
        bits = self._generator._bit_generator
        if self._address is not None and isinstance(state, Bits) and type(bits) is numpy.random.MT19937:
            memmove(bits.ctypes.state_address, state.words, _STATE.size)
            memmove(self._address, state.normal, _NORMAL.size)
        else:
            self._generator.set_state(state)


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
