"""The state dicts of a Pipe: the plain module's state under its names; over ranks, each rank its part.

    state_dict()  optimizer_state_dict(o)     this rank's part, for torch.distributed.checkpoint.save
    load_state_dict(s)  load_optimizer_state_dict(o, s)     the whole model's, or any part that has this rank's
    full_state_dict()  full_optimizer_state_dict(o)         all of it, on rank 0

So a checkpoint that four ranks wrote loads on one, two or three, and in the plain module.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from partition.names import LayeredModule, in_order, starts, units_of
from pipeline.common.arguments import check_optimizer, shown
from pipeline.common.call_lock import turn
from pipeline.distributed.remote_layer import RemoteLayer
from pipeline.entry.runtime import Runtime
from pipeline.entry.state.optimizer_state import load_optimizer_state, optimizer_state, own_part
from pipeline.entry.state.saved import Saved
from pipeline.entry.state.whole_optimizer_state import (
    copied_to_host,
    is_packed,
    names_of_groups,
    own_groups,
    whole_by_name,
    whole_state,
)
from pipeline.execution.communicator import Verdict
from pipeline.gradients.per_parameter import params_of
from pipeline.skip import SkipScope, within_scope


class StateDictMixin(LayeredModule, SkipScope, ABC):
    """The part of a Pipe that saves and loads."""

    @abstractmethod
    def to_sequential(self) -> nn.Sequential:
        """The plain module."""

    @property
    @abstractmethod
    def runtime(self) -> Runtime:
        """The assignment of stages, and the processes that run an operation together."""

    def full_state_dict(self) -> OrderedDict[str, Any] | None:
        """A copy of the whole model's state_dict, on the CPU, on rank 0; None on other ranks. All ranks call it.

        A tied parameter is one tensor under all its names.

        Example:
            >>> from torch import nn
            >>> from pipeline import Pipe
            >>> list(Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), [1, 1]).full_state_dict())
            ['0.weight', '0.bias']
        """
        with turn(), self.runtime.communicator("full_state_dict") as communicator:
            communicator.open(lambda values: {}, draws=False)
            state = self.state_dict()
            gathered = communicator.exchange.gather(state)
            communicator.agree(Verdict(None, None, True))
        if gathered is None:
            return None
        first_names = self.runtime.first_names
        whole: OrderedDict[str, Any] = OrderedDict()
        for name in in_order(gathered, self._modules):
            first = whole.get(first_names.get(name, ""))
            whole[name] = copied_to_host(gathered[name]) if first is None else first
        setattr(whole, "_metadata", getattr(state, "_metadata"))  # of all layers, wherever they are
        return whole

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer of this rank's parameters, by their names, to be saved with `state_dict()`.

        Args:
            optimizer: one of torch.optim's, but LBFGS.

        Returns:
            A flat dict: "state.<name>.exp_avg", "param_groups.<name>.lr", ..., as torch's get_optimizer_state_dict
            makes with flatten_optimizer_state_dict=True. Those of several ranks are parts of one.

        Raises:
            ValueError: the optimizer has a parameter that is none of the model's.
        """
        return optimizer_state(self._known(super().named_parameters(remove_duplicate=False), optimizer), optimizer)

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """A copy of an optimizer's state of all parameters, on the CPU, on rank 0; None on others. All ranks call it.

        Args:
            optimizer: one of torch.optim's, but LBFGS, of this rank's parameters; its groups in the order of the model.

        Returns:
            What `optimizer.state_dict()` is for the plain module's parameters, with their names ("param_names").
            It loads there, and by `load_optimizer_state_dict` on any number of ranks.

        Raises:
            ValueError: the groups, their options or the order of parameters are not those of one optimizer.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from pipeline import Pipe
            >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), [1, 1])
            >>> state = pipe.full_optimizer_state_dict(torch.optim.SGD(pipe.parameters(), lr=0.5))
            >>> state["param_groups"][0]["param_names"], state["param_groups"][0]["params"]
            (['0.weight', '0.bias'], [0, 1])
        """
        with turn(), self.runtime.communicator("full_optimizer_state_dict") as communicator:
            communicator.open(lambda values: {}, draws=False)
            first_names = self.runtime.first_names
            own = own_groups(self._known(self.named_parameters(), optimizer), optimizer, first_names)
            groups = communicator.exchange.gather({str(self.runtime.rank): own})
            communicator.agree(Verdict(None, None, True))
            whole = None
            if groups is not None:
                kept = [name for rank_groups in groups.values() for _, states in rank_groups for name in states]
                whole = whole_state(groups, dict.fromkeys(in_order([*first_names.values(), *kept], self._modules)))
            communicator.close()
        return whole

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load an optimizer's state, from any number of ranks.

        Args:
            optimizer: of the same class, over this rank's parameters.
            state_dict: from `optimizer_state_dict`, of this rank's parameters at least; or from
                `full_optimizer_state_dict`, or an optimizer of the plain module's parameters.

        Raises:
            ValueError: names that no rank has, or that are missing; numbers without names, and another order.
        """
        _check_state(state_dict, "full_optimizer_state_dict")
        if is_packed(state_dict):
            if not all("param_names" in group for group in state_dict["param_groups"]):
                own = self._known(self.named_parameters(), optimizer)
                names_of_groups(own, optimizer, self.runtime.first_names)  # numbers tell in one order alone
            state_dict = whole_by_name(state_dict, self.runtime.first_names)
        every_name = super().named_parameters(remove_duplicate=False)  # no two ranks save under one key
        named = self._known(every_name, optimizer)
        load_optimizer_state(named, optimizer, state_dict, self.runtime.first_names)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As nn.Module's: over ranks, this rank's, by the plain module's names and in the order of this rank's layers.

        A tied parameter is called by its first name on every rank that has it; with remove_duplicate=False by all.
        """
        topology = self.runtime.topology
        if topology is None or not topology.assignment.tied_parameters or not recurse:
            return super().named_parameters(prefix, recurse, remove_duplicate)
        dot = f"{prefix}." if prefix else ""
        return ((dot + name, param) for name, param in topology.named(super().named_parameters(), remove_duplicate))

    def _for_its_optimizer(self) -> list[nn.Parameter]:
        """Over ranks, an empty parameter where this one has none that is trained."""
        topology = self.runtime.topology
        is_trained = any(param.requires_grad for param in nn.Module.parameters(self))
        return [] if topology is None or is_trained else [topology.nothing]

    def _known(self, named: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
        """Parameters of this rank, and those in an optimizer for which it keeps nothing here, named "".

        These are empty ones, which stand for none, and parameters of the model that other ranks alone train.
        """
        check_optimizer(optimizer)
        own, topology = list(named), self.runtime.topology
        ids = {id(param) for _, param in own}
        others = [param for param in params_of(optimizer) if id(param) not in ids]
        return [*own, *[
            ("", param) for param in others
            if not param.numel() or topology is not None and topology.is_elsewhere(param)
        ]]  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's; over ranks, this rank's part of the whole model's. torchgpipe's keys are read too.

        Over ranks, and of a `Saved`, a tied parameter may stand under one of its names alone, as save_pretrained
        writes it.
        """
        _check_state(state_dict, "full_state_dict")
        remote = {number for number, layer in self._modules.items() if isinstance(layer, RemoteLayer)}
        if remote or isinstance(state_dict, Saved):
            units = units_of(self._modules)

            def is_remote(key: str) -> bool:
                holders = {number for start in starts(key) for number in units.get(start, ())}
                return bool(holders) and remote.issuperset(holders)

            state_dict = own_part(state_dict, is_remote, self.runtime.first_names)
        versions = getattr(state_dict, "_metadata", None)
        if versions is not None and "partitions" not in self._modules:
            renamed = OrderedDict(state_dict)
            names = {key: key.split(".", 2)[-1] for key in versions if re.match(r"partitions\.\d+\.", key)}
            setattr(renamed, "_metadata", OrderedDict((names.get(key, key), value) for key, value in versions.items()))
            state_dict = renamed
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Read torchgpipe's keys too: `partitions.<stage>.<layer>...` names the layer as the plain module does."""
        old = f"{prefix}partitions."
        if "partitions" not in self._modules:
            norms = {path for path, _ in within_scope(self.to_sequential(), _BatchNorm)}
            for key in [key for key in state_dict if key.startswith(old)]:
                _, _, name = key[len(old) :].partition(".")
                if prefix + name in state_dict:
                    args[-1].append(_COUNTED_ANEW.format(key=key, name=prefix + name))  # error_msgs of torch
                    break
                value = state_dict.pop(key)
                layer, _, last = name.rpartition(".")
                if layer in norms and last in ("sum", "sum_squares"):
                    continue  # what its DeferredBatchNorm has of an unfinished mini-batch
                state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.runtime.history.loaded = True
        self.runtime.history.stale.mark()  # other ranks load the others' layers


_COUNTED_ANEW = (
    "{key} names {name}, as another key does. The Pipe of torch.distributed.pipeline.sync counts layers anew in each "
    "stage, in the order of the plain module: load dict(zip(model.state_dict(), saved.values()))."
)


def _check_state(state_dict: object, method: str) -> None:
    if state_dict is None:
        raise TypeError(
            f"state_dict is None: over ranks {method}() gives it to rank 0 alone. Send it to the others with "
            "torch.distributed.broadcast_object_list."
        )
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict is {shown(state_dict)}. Give a mapping by names, as {method}() returns it.")
