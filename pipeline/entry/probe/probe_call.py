"""One forward of a probe: an uncut chunk through all stages, as of any call, with a record of its layers.

What it does to modules and generators is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from partition.contents import tensors_in
from partition.generators import Generator, States, generators_at, same_state, states_of
from partition.modes import mode_of
from partition.precision import weights_cast_anew
from pipeline.common.accelerators import entered
from pipeline.data.microbatch import Batch
from pipeline.data.pytrees import Activations, Tree, flatten, same_values
from pipeline.entry.probe.rows import all_same
from pipeline.execution.execution import Execution
from pipeline.execution.setup import Setup
from pipeline.execution.stages import stages_of
from pipeline.recompute.randomness import default_generators
from pipeline.stage.stage import StageRun
from scheduler import Kind

_REPEATS = 3


class LayerRun(NamedTuple):
    """A layer that has run: its input tensors, its output tensors, whether it drew random numbers, or wrote buffers."""

    number: int
    layer: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]
    draws: bool
    writes: bool


class ProbeCall:
    """One forward of an uncut chunk. A stage that raises, and all after it, have no output; the error is dropped.

    Attributes:
        stages: those in this process, by their numbers.
        stage_outputs: by stage, its output. None: it raised.
        output: of the last stage, if it is here and made any.
    """

    def __init__(
        self,
        setup: Setup,
        batch: Batch,
        generators: Sequence[Generator],
        put_back: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._put_back = put_back
        self._execution = Execution(setup, batch)
        self.stages = {run.layers.index: run for run in stages_of(self._execution, ends_in_loss=False)}
        self.stage_outputs: dict[int, list[Activations] | None] = {}
        self._inboxes: dict[int, tuple[list[Activations], States]] = {}
        self._generators = generators

    @property
    def output(self) -> Tree | None:
        outputs = self.stage_outputs.get(self._execution.last)
        return None if outputs is None else outputs[0].tree

    def run(self) -> None:
        """Run stage after stage."""
        with self._ran():
            pass

    @contextmanager
    def _ran(self) -> Iterator[None]:
        """Within: all stages have run. At the end what they have done to modules and generators is undone."""
        kept = generators_at(states_of(self._generators))
        with self._put_back(), self._execution.generators, weights_cast_anew(True), kept:
            try:
                self._execution.feed(grad=False)
                self._execution.run(0, {Kind.F: self._forward}, draws=True)
                yield
            finally:
                for stage in self.stages.values():
                    stage.rewind()
                    stage.release()

    def run_recorded(self) -> list[LayerRun]:
        """The same, with a record of each layer."""
        layers: list[LayerRun] = []
        numbers = {id(layer): number for run in reversed(self.stages.values()) for number, layer in run.layers.numbered}
        defaults = default_generators(self._execution.setup.layout.devices)
        before: dict[int, tuple[list[Tensor], list[Any], dict[str, Tensor]]] = {}

        def states() -> list[Any]:
            return [generator.get_state() for generator in (*defaults, *self._generators)]

        def begin(module: nn.Module, args: Any) -> None:
            if id(module) in numbers:
                buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
                before[id(module)] = _tensors(args), states(), buffers

        def record(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) in numbers:
                inputs, states_before, buffers = before.pop(id(module))
                draws = not all(map(same_state, states_before, states()))
                now = dict(module.named_buffers())
                writes = list(now) != list(buffers) or not all(map(same_values, now.values(), buffers.values()))
                layers.append(LayerRun(numbers[id(module)], module, inputs, _tensors(output), draws, writes))

        handles = [
            module_hooks.register_module_forward_pre_hook(begin), module_hooks.register_module_forward_hook(record)
        ]
        try:
            self.run()
        finally:
            for handle in handles:
                handle.remove()
        return layers

    def run_before(self, in_order: ProbeCall, is_judged: bool = False) -> dict[int, list[list[Activations] | None]]:
        """Run, then the stages of another call from the last to the first.

        Args:
            in_order: the other call.
            is_judged: the first of what a stage gives counts as well where it gathers statistics, without these: what
                keeps the rows of its last call alone finds others there, and then its own. Else that finds all that
                others have left: a table in a buffer is as long as an attribute says.

        Returns:
            By stage what it gave, several times one after the other; as in the other call, if it gave that at once.
        """
        is_whole = None not in in_order.stage_outputs.values()
        outputs: dict[int, list[list[Activations] | None]] = {}
        with self._ran():
            for stage, run in reversed(self.stages.items()) if is_whole else ():
                inputs, expected = in_order._inboxes[stage], in_order.stage_outputs[stage]
                gathers = any([mode_of(module) for _, layer in run.layers.numbered for module in layer.modules()])
                outputs[stage] = [self._again(run, *inputs, rewinds=gathers and is_judged)]
                if not all_same(outputs[stage][0], expected):
                    repeated = [self._again(run, *inputs, rewinds=gathers) for _ in range(1 + _REPEATS)]
                    outputs[stage] = repeated if gathers and not is_judged else [*outputs[stage], *repeated]
        return outputs

    def _again(
        self, run: StageRun, inbox: Sequence[Activations], states: States, rewinds: bool
    ) -> list[Activations] | None:
        """Run a stage as before, but after others. `rewinds`: without what these have left in buffers: statistics."""
        if rewinds:
            run.snapshot.buffers.roll_back()
        place = self._execution.setup.layout.places[run.layers.index]
        with generators_at(states), entered(place.device):
            return self._outputs_of(run, inbox)

    def _forward(self, stage: int, chunk: int) -> None:
        execution, run = self._execution, self.stages[stage]
        inbox = execution.take(stage, chunk)
        self._inboxes[stage] = inbox, states_of(self._generators)
        self.stage_outputs[stage] = outputs = self._outputs_of(run, inbox) if inbox[0].tree.tensors else None
        if stage != execution.last:
            values = execution.setup.layout.values.made_by[stage]
            nothing = [Activations(flatten(None, run.layers.name), ())] * len(values)
            execution.mailbox.put(stage, chunk, nothing if outputs is None else outputs)

    @staticmethod
    def _outputs_of(run: StageRun, inbox: Sequence[Activations]) -> list[Activations] | None:
        try:
            messages = run.forward(0, inbox, False, False)
        except Exception:  # the call itself raises it, or nothing is known
            return None
        copies = [message.tree._replace(tensors=tuple(_tensors(message.tree.tensors))) for message in messages]
        return [message._replace(tree=tree) for message, tree in zip(messages, copies, strict=True)]


def _tensors(value: Any) -> list[Tensor]:
    """Copies of those in a value, which a later layer, or another run, may write in place."""
    return [tensor.clone() for tensor in tensors_in(value)]
