"""Random numbers that depend only on (seed of the call, chunk, layer), whatever runs before that layer.

    torch's default CPU generator --one draw--> seed of the call
    layer_seed(seed, chunk, layer) --manual_seed--> the default generators, just before that layer computes

The default generators are torch's (the CPU's, and that of each accelerator), Python's (`random.random()`) and numpy's
(`numpy.random.rand()`). So a dropout mask does not depend on the schedule, the balance, the checkpoint mode or the
number of processes, and a recomputation repeats it without keeping generator states. Around a call every default
generator is left as it was found, the one draw aside. The rule is public: with `layer_seed` the same masks can be had
on the plain module. Generators that modules hold are not seeded: `recompute/snapshot.py` keeps their states.

Where nothing was seen to draw from Python's and numpy's generators, whose seeds take six times as long as torch's, they
get none. If something draws from them all the same, the call runs once more, with all seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from partition.generators import (
    OF_HOST,
    Generator,
    States,
    generators_among,
    put_generators_back,
    stand_at,
    states_of,
)
from partition.names import OF_EVERY_MODULE
from pipeline.common import accelerators
from pipeline.common.arguments import check_count, shown
from pipeline.common.touches import Touches
from scheduler.errors import whole

_MASK32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15


def layer_seed(seed: int, chunk: int, layer: int) -> int:
    """Return the seed of the generators while `layer` computes `chunk` in the call whose seed is `seed`.

    Within one call no two (chunk, layer) pairs below 65,536 share the lower 32 bits, which are all that torch's CPU
    generator (a Mersenne Twister) and numpy's take of a seed. With n = layer_seed(...), the default generators are as
    after `torch.manual_seed(n)`, `random.seed(n)` and `numpy.random.seed(n & 0xFFFFFFFF)`.

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
    number = whole(seed)  # of numpy too, whose arithmetic overflows
    if number is None:
        raise TypeError(f"seed is {shown(seed)}. Give a whole number.")
    return _combine(*_keys(number), check_count("chunk", chunk, least=0), check_count("layer", layer, least=0))


def draw_seed() -> int:
    """Draw a call's seed: one number from torch's default CPU generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def quiet_layers(layers: Iterable[tuple[int, nn.Module]]) -> frozenset[int]:
    """The indices of the layers that certainly draw no random number, forward or backward: they need no seed.

    Every module in them is exactly one of torch's that never draws, without changes by the user: no hook, no method, no
    parameter of another class.
    """
    if module_hooks._has_any_global_hook() or _calls_of(nn.Module) != _MODULES_OWN:
        return frozenset()
    return frozenset([index for index, layer in layers if all(map(_is_quiet, layer.modules()))])


def unobserved() -> bool:
    """Whether no mode and no hook of saved tensors observes what torch's own layers compute or save."""
    return not (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._autograd._top_saved_tensors_default_hooks(False)
    )


def is_torchs_own(module: nn.Module) -> bool:
    """Whether a module is exactly one of torch's that never draw and never write an attribute, as its class made it.

    It has no hook then, and no attribute that others have set: a number, a method.
    """
    kind = type(module)
    forward = _FORWARDS.get(kind)
    if forward is None or kind.forward is not forward:  # of another class, or patched
        return False
    has_hooks = module._forward_pre_hooks or module._forward_hooks
    return not has_hooks and module.__dict__.keys() <= _QUIET[kind]


def _is_quiet(module: nn.Module) -> bool:
    return (
        is_torchs_own(module)
        and not (module._backward_pre_hooks or module._backward_hooks)
        and all([type(tensor) in _PLAIN for tensor in (*module._parameters.values(), *module._buffers.values())])
    )


_PLAIN = (nn.Parameter, torch.Tensor, type(None))
_QUIET: dict[type[nn.Module], frozenset[str]] = {  # with the names of their attributes, which their __init__ sets
    kind: OF_EVERY_MODULE.union(*[getattr(base, "__init__").__code__.co_names for base in kind.__mro__[:-1]])
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

_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {kind: kind.forward for kind in _QUIET}


def _calls_of(kind: type[nn.Module]) -> tuple[object, ...]:
    return kind.__call__, kind._call_impl, kind._wrapped_call_impl


_MODULES_OWN = _calls_of(nn.Module)


class GeneratorGuard:
    """The default generators around the phases of a call: at the end of each they are put back as they were found.

    A context; a nested one does nothing more.

    Args:
        devices: those of the layers.
        spared: those of the host that layers get no seed in as long as nothing draws from them.

    Attributes:
        spared: the same.
        seeds_all: whether layers get their seeds in the spared ones too. If not, each phase begins with these as
            the first has found them: what draws from one unseen, and puts it back, draws in a recomputation as before.
        touches: how often a spared one was put back within, or with all spared a switch of the process changed.
    """

    def __init__(self, devices: Iterable[torch.device], spared: Sequence[Generator]) -> None:
        self.spared = spared
        self.seeds_all = True
        self.touches = Touches(len(spared) == len(OF_HOST))
        self._all = default_generators(devices)
        self._found: States = []
        self._begun: States = []  # the spared ones, where they get no seeds
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._found = states_of(self._all)
            if not self.seeds_all:
                put_generators_back(self._begun)
                self._begun = self._begun or [state for state in self._found if state[0] in self.spared]

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            put_generators_back(self._found)

    @property
    def are_untouched(self) -> bool:
        """Whether the spared ones are, and as far as touches were counted always were, as the phase has begun."""
        return not self.touches.count and stand_at(self._begun)


class Seeder:
    """Seeds the default generators of the host and of some devices for each (chunk, layer) of one call.

    Args:
        seed: of the call.
        devices: where the layers compute.
        guard: puts the generators back at the end; says which of the host are seeded.

    Attributes:
        drew: whether anything drew from one that may be spared, or touched it, where all were seeded.
    """

    __slots__ = ("_keys", "_spared", "_others", "_guard", "_untouched", "_touches", "drew")

    def __init__(self, seed: int, devices: Iterable[torch.device], guard: GeneratorGuard) -> None:
        self._keys = _keys(seed)
        self._spared = guard.spared
        self._others = [generator for generator in default_generators(devices) if generator not in guard.spared]
        self._guard = guard
        self._untouched: States = []  # the spared ones as they were seeded last
        self._touches = 0
        self.drew = False

    def seed(self, chunk: int, layer: int) -> None:
        """Seed the generators for what runs next."""
        number = _combine(*self._keys, chunk, layer)
        for generator in self._others:
            generator.manual_seed(number)
        if self._guard.seeds_all:
            self.settle()
            for generator in self._spared:
                generator.manual_seed(number)
            self._untouched = states_of(self._spared)
            self._touches = self._guard.touches.count

    def settle(self) -> None:
        """Note the end of the work that was seeded last."""
        if self._untouched:
            touched = self._guard.touches.count != self._touches
            self.drew = self.drew or touched or not stand_at(self._untouched)
            self._untouched = []


def default_generators(devices: Iterable[torch.device]) -> tuple[Generator, ...]:
    """The default generators that layers on `devices` may draw from: the host's, always, and each accelerator's own."""
    return (*OF_HOST, *accelerators.device_generators(devices))


def private_generators(modules: Iterable[nn.Module]) -> dict[int, Generator]:
    """The generators that modules hold as attributes, by id: no seed reaches them, so their states are kept."""
    return generators_among(chain.from_iterable([vars(module).values() for module in modules]))


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
    it runs for every layer of every chunk.
    """
    word = ((chunk << 16) ^ layer ^ (layer >> 16) ^ low) & _MASK32
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _MASK32
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _MASK32
    first = word ^ (word >> 16)
    word = (first + high) & _MASK32
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _MASK32
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _MASK32
    return (first << 32) | word ^ (word >> 16)
