"""Which random numbers does a layer see? Those of (seed of the call, chunk, layer), whatever runs before it.

    torch's default CPU generator --one draw--> seed of the call
    layer_seed(seed, chunk, layer) --manual_seed--> the default generators, just before that layer computes

So a dropout mask does not depend on the schedule, the balance, the checkpoint mode or the number of processes, and a
recomputation repeats it without keeping generator states. Around a call every generator is left as it was found, the
one draw aside. The rule is public: with `layer_seed` the same masks can be had on the plain module.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

_MASK32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15


def layer_seed(seed: int, chunk: int, layer: int) -> int:
    """Return the seed of the generators while `layer` computes `chunk` in the call whose seed is `seed`.

    Within one call no two (chunk, layer) pairs below 65,536 share the lower 32 bits, which are all that torch's CPU
    generator (a Mersenne Twister) takes of a seed.

    Args:
        seed: the call's seed, the one number that a call draws from torch's default CPU generator.
        chunk: index of the micro-batch, from 0.
        layer: index of the layer in the `nn.Sequential`, from 0.

    Returns:
        An integer in [0, 2**64) for `torch.Generator.manual_seed`.

    Example:
        >>> layer_seed(0, chunk=1, layer=2) == layer_seed(0, chunk=1, layer=2)
        True
        >>> layer_seed(0, chunk=1, layer=2) == layer_seed(0, chunk=2, layer=1)
        False
    """
    return _combine(*_keys(seed), chunk, layer)


def draw_seed() -> int:
    """Draw a call's seed: one number from torch's default CPU generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def quiet_layers(layers: Iterable[tuple[int, nn.Module]]) -> frozenset[int]:
    """The indices of those layers that surely draw no random number, forward or backward: they need no seed.

    Every module in them is exactly one of torch's that never draws, and nobody has put anything of his own into it: no
    hook, no method, no parameter of another class.
    """
    if module_hooks._has_any_global_hook():
        return frozenset()
    return frozenset([index for index, layer in layers if all(map(_is_quiet, layer.modules()))])


def unobserved() -> bool:
    """Whether nobody sees what torch's own layers compute or save: no mode, no hooks of saved tensors."""
    return not (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._autograd._top_saved_tensors_default_hooks(False)
    )


def _is_quiet(module: nn.Module) -> bool:
    methods = _QUIET.get(type(module))
    return (
        methods is not None
        and methods.isdisjoint(vars(module))
        and not (module._forward_pre_hooks or module._forward_hooks)
        and not (module._backward_pre_hooks or module._backward_hooks)
        and all([type(each) in _PLAIN for each in (*module._parameters.values(), *module._buffers.values())])
    )


_PLAIN = (nn.Parameter, torch.Tensor, type(None))
_QUIET: dict[type[nn.Module], frozenset[str]] = {  # with their methods' names, for which an instance may have its own
    kind: frozenset(["_compiled_call_impl", *[name for name in dir(kind) if callable(getattr(kind, name))]])
    for kind in (
        nn.Sequential, nn.Identity, nn.Flatten, nn.Unflatten,
        nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d,
        nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
        nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
        nn.Softsign, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softmax,
        nn.LogSoftmax, nn.GLU,
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
        nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm,
        nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
        nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
        nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
        nn.Upsample, nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad2d,
    )
}


class Seeder:
    """Seeds the default generators of some devices for each (chunk, layer) of one call."""

    __slots__ = ("_keys", "_generators", "drew")

    def __init__(self, seed: int, devices: Iterable[torch.device]) -> None:
        self._keys = _keys(seed)
        self._generators = default_generators(devices)
        self.drew = False  # from the CPU's generator: see LearningSeeder

    def settle(self) -> None:
        """The work that was seeded last is done."""

    def seed(self, chunk: int, layer: int) -> None:
        number = _combine(*self._keys, chunk, layer)
        for generator in self._generators:
            generator.manual_seed(number)


class LearningSeeder(Seeder):
    """A seeder that finds out whether anything is drawn from the CPU's default generator."""

    __slots__ = ("_untouched",)

    def __init__(self, seed: int, devices: Iterable[torch.device]) -> None:
        super().__init__(seed, devices)
        self._untouched: torch.Tensor | None = None

    def seed(self, chunk: int, layer: int) -> None:
        self.settle()
        super().seed(chunk, layer)
        self._untouched = torch.default_generator.get_state()

    def settle(self) -> None:
        if self._untouched is not None:
            self.drew = self.drew or not torch.equal(self._untouched, torch.default_generator.get_state())
            self._untouched = None


class AcceleratorSeeder(Seeder):
    """A seeder that leaves the CPU's default generator to others."""

    __slots__ = ()

    def __init__(self, seed: int, devices: Iterable[torch.device]) -> None:
        super().__init__(seed, devices)
        self._generators = self._generators[1:]


def default_generators(devices: Iterable[torch.device]) -> tuple[torch.Generator, ...]:
    """The default generators that layers on `devices` may draw from: the CPU's, always, and each GPU's own."""
    cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    return (torch.default_generator, *(torch.cuda.default_generators[index] for index in cuda))


@contextmanager
def generators_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave the default generators of `devices` as they were found, whatever is drawn inside."""
    kept = [(generator, generator.get_state()) for generator in default_generators(devices)]
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)


def private_generators(modules: Iterable[nn.Module]) -> tuple[torch.Generator, ...]:
    """The `torch.Generator` objects that modules hold as attributes: no seed reaches them, so their states are kept."""
    known: dict[type, bool] = {}  # asking each value would take milliseconds: torch.Generator has a slow metaclass
    found: dict[torch.Generator, None] = {}
    for module in modules:
        for value in vars(module).values():
            kind = type(value)
            if kind not in known:
                known[kind] = issubclass(kind, torch.Generator)
            if known[kind]:
                found[value] = None
    return tuple(found)


HostStates: TypeAlias = tuple[Any, Any]


def host_states() -> HostStates:
    """The states of Python's and numpy's global generators, which no seed of ours reaches."""
    return random.getstate(), numpy.random.get_state()


def same_host_states(one: HostStates, other: HostStates) -> bool:
    """Whether nothing was drawn from Python's and numpy's global generators in between."""
    numpys = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(numpy.array_equal(mine, theirs) for mine, theirs in numpys)


def put_host_back(states: HostStates) -> None:
    """Put Python's and numpy's global generators at earlier states."""
    random.setstate(states[0])
    numpy.random.set_state(states[1])


@contextmanager
def host_at(states: HostStates) -> Iterator[None]:
    """Within: Python's and numpy's global generators are at earlier states. At the end: where they were found."""
    found = host_states()
    put_host_back(states)
    try:
        yield
    finally:
        put_host_back(found)


@contextmanager
def generators_at(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> Iterator[None]:
    """Put generators at earlier states, and back where they were at the end."""
    found = [(generator, generator.get_state()) for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in found:
            generator.set_state(state)


def _keys(seed: int) -> tuple[int, int]:
    """Two 32-bit keys from a seed of any size (splitmix64, Steele et al. 2014)."""
    mixed = (seed + _GOLDEN) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    return mixed & _MASK32, mixed >> 32


def _combine(low: int, high: int, chunk: int, layer: int) -> int:
    """A bijection of the 32 bits (chunk, layer), chosen by the keys: so the lower halves of two pairs differ.

    Two rounds of the finalizer of MurmurHash3 (Appleby), itself a bijection of 32-bit words; written out twice, since
    every layer of every chunk comes through here.
    """
    word = ((chunk << 16) ^ layer ^ (layer >> 16) ^ low) & _MASK32
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _MASK32
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _MASK32
    first = word ^ (word >> 16)
    word = (first + high) & _MASK32
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _MASK32
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _MASK32
    return (first << 32) | word ^ (word >> 16)
