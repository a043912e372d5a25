"""RemoteLayer: the placeholder in a Pipe for a layer that another rank has.

    rank 0   0 Linear   1 ReLU    2 RemoteLayer      3 RemoteLayer      _modules of the Pipe: names, len(), indices are
    rank 1   0 RemoteLayer  1 RemoteLayer  2 Linear  3 Softmax          those of the plain nn.Sequential on every rank

It holds no tensor and computes nothing, but it knows the layer's keys: a state_dict of the whole model loads strictly
on every rank, and a state_dict from here tells the versions of all layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from partition.generators import Generator
from partition.modes import mode_of
from partition.names import ModelNames, NamedLayer, starts
from pipeline.distributed.stale import is_mark, without_marks
from pipeline.recompute.randomness import private_generators


class BuffersElsewhere:
    """The buffers of a layer of another rank, and its modules that have some, while a layer here has them, too.

    Args:
        modules: of the layer.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        holders = [module for module in modules if module._buffers]
        buffers = [buffer for module in holders for buffer in module._buffers.values() if buffer is not None]
        self._holders = weakref.WeakSet(holders)
        self._buffers = weakref.WeakValueDictionary(zip(map(id, buffers), buffers))

    def __reduce__(self) -> tuple[Any, ...]:
        return BuffersElsewhere, ((),)  # a copy shares nothing with layers here

    def ids(self) -> Iterator[int]:
        """The ids of the buffers, and of the tables of the modules."""
        yield from map(id, [module._buffers for module in self._holders])
        yield from self._buffers


class RemoteLayer(NamedLayer):
    """The place of a layer that another rank has: no parameters, no buffers, not to be called.

    requires_grad_() and hooks do nothing here, and do what they do where the layer is. So do train() and eval(); they
    also tell modules of the layer that stand in layers here.

    Args:
        layer: the layer, whose training mode this takes, and of which it keeps nothing alive but random generators.
        index: its index in the nn.Sequential.
        stage: the stage that it belongs to.
        rank: the rank that has it.
        here: the ids of the modules that layers of this rank have.

    Raises:
        RuntimeError: when called.
        AttributeError: asked for what the layer would have, or given a tensor or a module.

    Example:
        >>> from torch import nn
        >>> from pipeline.distributed.remote_layer import RemoteLayer
        >>> RemoteLayer(nn.Linear(2, 3), index=4, stage=2, rank=1)
        Linear(...) of stage 2 on rank 1
    """

    def __init__(
        self, layer: nn.Module, index: int, stage: int, rank: int, here: Collection[int] = ()
    ) -> None:
        super().__init__()
        kind = type(layer).__name__
        self._where = f"layer {index} ({kind}) belongs to stage {stage}, which rank {rank} has"
        self._shown = f"{kind}(...) of stage {stage} on rank {rank}"
        with without_marks(layer):
            state = layer.state_dict()
        self._versions = dict(getattr(state, "_metadata", None) or {})
        self._in_model = layer.in_model if isinstance(layer, NamedLayer) else None
        names = [""] if self._in_model is None else self._in_model.names
        self._keys = frozenset(state)
        # In these it may load any key, since it changes keys as it loads them.
        self._open_names = frozenset(names if any(map(_changes_keys, layer.modules())) else ())
        self.training = mode_of(layer)
        self._modules_here = [module for module in layer.modules() if id(module) in here]
        # What stages here may hold too, see recompute/snapshot.py.
        self.generators: dict[int, Generator] = private_generators(layer.modules())
        self.held_buffers = BuffersElsewhere(layer.modules())

    def train(self, mode: bool = True) -> RemoteLayer:
        """As nn.Module's, of what is here."""
        for module in self._modules_here:
            module.train(mode)
        super().train(mode)
        return self

    @property
    def in_model(self) -> ModelNames | None:
        return self._in_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self._where}; it cannot be called here. Call the Pipe, which runs every layer where it is."
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            where = self.__dict__.get("_where", "the layer is on another rank")  # not there in one half made
            raise AttributeError(
                f"{where}, so its {name!r} is not here. Look at it before Pipe(...), or loop over "
                "pipe.named_parameters() or pipe.modules(), in which each rank finds its own."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor | nn.Module):
            self._refuse(name)
        super().__setattr__(name, value)

    def _refuse(self, name: str, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError(
            f"{self._where}, so no tensor or module can be put into it here (as {name!r}). Change the layers before "
            "Pipe(...), or only on the rank that has this one."
        )

    register_parameter = register_buffer = add_module = _refuse

    def refuse_another(self) -> NoReturn:
        """Raise: another layer was put into the place of this one."""
        raise AttributeError(
            f"{self._where}, so no other layer can be put into its place here. Replace it before Pipe(...), or only on "
            "the rank that has it."
        )

    def __repr__(self) -> str:
        return self._shown

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if hasattr(destination, "_metadata"):  # not where a user collects keys in a plain dict
            start, versions = self._start(prefix), destination._metadata
            versions.pop(prefix[:-1], None)  # of the placeholder
            for name, version in self._versions.items():
                versions.setdefault(f"{start}{name}" if name else start[:-1], dict(version))

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Let go what the layer loads on its own rank; what it would not know is unexpected here too."""
        if strict:
            unexpected_keys.extend([key for key in state_dict if key.startswith(prefix)])
            for start in (prefix, self._start(prefix)):
                unexpected_keys[:] = [key for key in unexpected_keys if not self._may_load(key, start)]

    def _start(self, prefix: str) -> str:
        """The beginning of the layer's keys, of which those of a model have no number."""
        return prefix if self._in_model is None else prefix[: prefix[:-1].rfind(".") + 1]

    def _may_load(self, key: str, start: str) -> bool:
        name = key.removeprefix(start)
        return key.startswith(start) and (name in self._keys or not self._open_names.isdisjoint(starts(name)))


def _changes_keys(module: nn.Module) -> bool:
    """Whether a module may load keys that it would not save."""
    overrides_loading = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return overrides_loading or not all(map(is_mark, module._load_state_dict_pre_hooks.values()))
