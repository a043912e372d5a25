"""Python's and numpy's generators at earlier states draw what they drew there, whatever was drawn before and since.

The reference is their own way of keeping a state.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.generators import Bits, NumpyBits, NumpyGenerator, PythonGenerator, same_state


class Own(random.Random):
    """A generator of the user's, with a state of its own."""

    count = 0

    def random(self) -> float:
        self.count += 1
        return super().random()

    def getstate(self) -> Any:
        return self.count, super().getstate()

    def setstate(self, state: Any) -> None:
        self.count, own = state
        super().setstate(own)


def philox() -> numpy.random.RandomState:
    return numpy.random.RandomState(numpy.random.Philox(3))


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "python": (lambda: random.Random(3), PythonGenerator),
    "python, global": (lambda: random, PythonGenerator),
    "python, own": (lambda: Own(3), PythonGenerator),
    "numpy": (lambda: numpy.random.RandomState(3), NumpyGenerator),
    "numpy, global": (lambda: numpy.random, NumpyGenerator),
    "numpy, of other bits": (philox, NumpyGenerator),
    "bits": (lambda: numpy.random.PCG64(3), NumpyBits),
}
DRAWS: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda own: own.random(),
    "normal": lambda own: own.gauss(0, 1) if hasattr(own, "gauss") else own.standard_normal(),
    "whole": lambda own: own.randint(0, 9),
    "seed": lambda own: None if has_other_bits(own) else own.seed(7),
}


def has_other_bits(own: Any) -> bool:
    """Those numpy cannot seed."""
    return isinstance(own, numpy.random.RandomState) and type(own._bit_generator) is not numpy.random.MT19937


def drawn(own: Any, names: list[str]) -> list[Any]:
    own = numpy.random.RandomState(own) if isinstance(own, numpy.random.BitGenerator) else own
    return [DRAWS[name](own) for name in names]


@pytest.mark.parametrize("kind", KINDS)
@given(before=st.lists(st.sampled_from([*DRAWS])), since=st.lists(st.sampled_from([*DRAWS])))
def test_a_generator_at_an_earlier_state_draws_the_same_again(kind: str, before: list[str], since: list[str]) -> None:
    make, adapter = KINDS[kind]
    own = make()
    generator = adapter(own)
    drawn(own, before)
    after = [*since, "normal", "uniform", "normal"]
    state = generator.get_state()
    first = drawn(own, after)
    then = generator.get_state()
    assert not same_state(state, then)
    generator.set_state(copy.deepcopy(state))
    assert same_state(state, generator.get_state())
    assert drawn(own, after) == first and same_state(then, generator.get_state())


@pytest.mark.parametrize("kind", ["python", "numpy"])
def test_a_state_that_lies_in_memory_is_the_one_that_the_generator_gives_out(kind: str) -> None:
    """One of the half of a pair of normal numbers alone, too: numpy keeps it beside the bits."""
    make, adapter = KINDS[kind]
    own = make()
    generator = adapter(own)
    drawn(own, ["normal"])
    state, given_out = generator.get_state(), own.getstate() if kind == "python" else own.get_state(legacy=False)
    drawn(own, ["normal"])
    assert isinstance(state, Bits) and generator.get_state().words == state.words
    assert generator.get_state().normal != state.normal
    drawn(own, ["uniform"])
    generator.set_state(state)
    assert repr(own.getstate() if kind == "python" else own.get_state(legacy=False)) == repr(given_out)


def test_bits_are_seeded_as_new_ones_are() -> None:
    generator = numpy.random.default_rng(0)
    NumpyBits(generator.bit_generator).manual_seed(7)
    assert (generator.random(3) == numpy.random.default_rng(numpy.random.PCG64(7)).random(3)).all()


def test_the_global_generator_of_numpy_may_get_other_bits() -> None:
    found = numpy.random.get_bit_generator()
    generator = NumpyGenerator(numpy.random)
    try:
        for bits in (numpy.random.Philox(3), numpy.random.MT19937(3)):
            numpy.random.set_bit_generator(bits)
            state = generator.get_state()
            first = numpy.random.standard_normal(3)
            generator.set_state(state)
            assert (numpy.random.standard_normal(3) == first).all()
            generator.manual_seed(7)
            first = numpy.random.standard_normal(3)  # and half of a pair waits
            generator.manual_seed(7)
            assert (numpy.random.standard_normal(3) == first).all()
    finally:
        numpy.random.set_bit_generator(found)
