"""Random numbers that depend only on (seed of the call, chunk, layer), whatever runs before that layer.

    torch's default CPU generator --one draw--> seed of the call
    layer_seed(seed, chunk, layer) --manual_seed--> the default generators, just before that layer computes

The default generators are torch's (the CPU's, and that of each accelerator), Python's (`random.random()`) and numpy's
(`numpy.random.rand()`). So a dropout mask does not depend on the schedule, the balance, the checkpoint mode or the
number of processes, and a recomputation repeats it without keeping generator states. Around a call every default
generator is left as it was found, the one draw aside. The rule is public: with `layer_seed` the same masks can be had
on the plain module. Generators that modules hold are not seeded: `recompute/snapshot.py` keeps their states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from partition.generators import (
    OF_HOST,
    OUTSIDE_TORCH,
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

    Those outside torch are kept only when one will be seeded. A context; a nested one does nothing more.

    Attributes:
        touches: how often one was put back within, or a switch of the process changed, as far as that was counted.
        seeds_host: whether layers get their seeds in those of the host, or nothing draws from them.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.touches = Touches()
        self.seeds_host = True
        self._of_torch = (torch.default_generator, *accelerators.device_generators(devices))
        self._states: States = []
        self._has_all = False
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._has_all = False
            self._states = states_of(self._of_torch)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            put_generators_back(self._states)

    def keep_all(self) -> None:
        """Keep all: any default generator may be seeded or drawn from, from now on."""
        if not self._has_all:
            self._states += states_of(OUTSIDE_TORCH)
            self._has_all = True

    @property
    def is_host_untouched(self) -> bool:
        """Whether the default generators of the host, all of which were kept, are and always were as they were found.

        And the switches of the process, so far as touches were counted.
        """
        if self.touches.count:
            return False
        return stand_at([(generator, state) for generator, state in self._states if generator in OF_HOST])


class Seeder:
    """Seeds the default generators of the host and of some devices for each (chunk, layer) of one call.

    Args:
        seed: of the call.
        devices: where the layers compute.
        guard: puts the generators back at the end; says whether those of the host are seeded.
        learns: whether to find out if anything draws from the host's generators, or touches the process.

    Attributes:
        drew: whether something did.
    """

    __slots__ = ("_keys", "_of_host", "_of_devices", "_guard", "_learns", "_untouched", "_touches", "drew")

    def __init__(
        self, seed: int, devices: Iterable[torch.device], guard: GeneratorGuard, learns: bool = False
    ) -> None:
        self._keys = _keys(seed)
        self._of_host = [generator.manual_seed for generator in OF_HOST]
        self._of_devices = [generator.manual_seed for generator in accelerators.device_generators(devices)]
        self._guard = guard
        self._learns = learns
        self._untouched: list[Any] = []  # the states of the host's generators as they were seeded last
        self._touches = 0
        self.drew = False

    def seed(self, chunk: int, layer: int) -> None:
        """Seed the generators for what runs next."""
        guard = self._guard
        number = _combine(*self._keys, chunk, layer)
        if guard.seeds_host:
            if self._learns:
                self.settle()
            guard.keep_all()
            for seed in self._of_host:
                seed(number)
            if self._learns:
                self._untouched = [generator.get_state() for generator in OF_HOST]
                self._touches = guard.touches.count
        for seed in self._of_devices:
            seed(number)

    def settle(self) -> None:
        """Note the end of the work that was seeded last."""
        if self._untouched:
            touched = self._guard.touches.count != self._touches
            self.drew = self.drew or touched or not stand_at(zip(OF_HOST, self._untouched, strict=True))
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
