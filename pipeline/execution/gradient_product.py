"""The derivative of gradients along cotangents: the backward of a backward, where no process has every stage.

    G = J^T g             the gradients that a backward gives: of the input, of all parameters; g: of the output
    phi = <G, c>          c: the cotangents of these gradients, which go along as tangents (execution/product.py)
    F     (h, h')         h' = J (c of what is before)
    last  g, seeds        derivatives of <J^T g, (h', c)>: by g it is y', the tangent of the output
    B     (l, l')         the derivatives of phi: by the input, by the parameters

It is the product with a Hessian (pipeline/curvature/products/matrices.py) of the function <g, y>, with the forwards of
an earlier call computed once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from pipeline.common.graph import sum_with
from pipeline.data.pytrees import Activations, Grads, Tree
from pipeline.data.tangents import Inbox, LeafGrads
from pipeline.data.values import CALLER
from pipeline.execution.communicator import Pair, StageGrad
from pipeline.execution.execution import Execution
from pipeline.execution.product import Product
from pipeline.stage.earlier_forwards import EarlierForwards
from pipeline.stage.stage import StageRun
from pipeline.stage.stage_parameters import StageParameters
from pipeline.stage.stage_rule import ProductGraph, StageRule


class GradientProduct(Product):
    """One pass of tangents through the stages of an earlier call.

    Args:
        execution: of the call.
        stages: those in this process, after their forwards.
        live: for each tensor of the input, whether it has a gradient.
        grads: of each chunk's outputs, in the process of the last stage.
        of_input: cotangents of the gradients of the input's tensors.
        of_owners: (parameter, cotangent of its gradient) by the parameter's id.
    """

    sends_gradient = True

    def __init__(
        self,
        execution: Execution,
        stages: Sequence[StageRun],
        live: Sequence[bool],
        grads: Sequence[Grads],
        of_input: Grads,
        of_owners: Mapping[int, Pair],
    ) -> None:
        devices = execution.setup.layout.devices
        rules = {stage.layers.index: self._rule(stage, devices[stage.layers.index]) for stage in stages}
        super().__init__(execution, rules, 1)
        self._live, self._grads = live, grads
        self._of_input, self._of_owners = of_input, of_owners
        self._sums: dict[tuple[int, int], StageGrad] = {}  # by stage and parameter
        self._outputs: dict[int, Grads] = {}  # by chunk

    def _rule(self, stage: StageRun, device: torch.device) -> StageRule:
        along, add = partial(self._along, device), partial(self._add, stage.layers.index)
        parameters = StageParameters(stage.aliases, (), 1, along, add)
        parameters.captured.update(stage.external.leaves)
        return StageRule(stage.layers, parameters, EarlierForwards(stage))

    def _along(self, device: torch.device, owner: Tensor) -> list[Tensor | None]:
        """The tangent of a parameter."""
        _, cotangent = self._of_owners.get(id(owner), (owner, None))
        return [None if cotangent is None else cotangent.to(device)]

    def _add(self, stage: int, owner: Tensor, parts: Sequence[Tensor | None]) -> None:
        (product,) = parts
        if product is not None:
            _, _, total = self._sums.get((stage, id(owner)), (stage, owner, None))
            self._sums[stage, id(owner)] = stage, owner, sum_with(total, product, owner)

    # --------------------------------------------------------------------------------------------------------- run

    def run(self) -> tuple[list[Grads], list[StageGrad], list[Grads]]:
        """Run both phases of the call.

        Returns:
            The derivatives of phi: by the tensors of the input, for each chunk, in the process of the first stage; by
            the parameters of this process, for each stage; by the gradients of each chunk's outputs, in the process of
            the last stage.
        """
        execution = self._execution
        try:
            with execution.generators, torch.enable_grad():
                self._feed()
                for phase in range(2):
                    execution.run(phase, self.work(), draws=True)
                inputs = self._of_inputs() if 0 in self._run else []
        except BaseException:
            execution.drop_values()
            raise
        finally:
            for stage in self._run.values():
                stage.release()
        chunks = range(execution.batch.chunks)
        return inputs, list(self._sums.values()), [self._outputs[i] for i in chunks if self._outputs]

    def _feed(self) -> None:
        """Post the chunks of the input with their tangents."""
        batch = self._execution.batch
        if 0 not in self._run:
            return
        tangents = [
            batch.cut_alike(index, cotangent) for index, cotangent in enumerate(self._of_input) if self._live[index]
        ]
        for chunk in range(batch.chunks):
            tree, _, memory, _ = batch.message(chunk, grad=False)
            chunk_tangents = [pieces[chunk] for pieces in tangents]
            message = Activations(Tree((*tree.tensors, *chunk_tangents), tree.skeleton), tuple(self._live), memory)
            self._execution.mailbox.put(CALLER, chunk, [message])

    def _of_inputs(self) -> list[Grads]:
        """The derivatives that came back to the input, behind the gradients themselves."""
        count, inputs = sum(self._live), []
        for chunk in range(self._execution.batch.chunks):
            (back,) = self._execution.mailbox.take_grads(CALLER, chunk)
            derivatives = iter(back[count:])
            inputs.append(tuple([next(derivatives, None) if is_live else None for is_live in self._live]))
        return inputs

    # --------------------------------------------------------------------------------------------------- what B does

    def at_end(self, run: StageRule, chunk: int, graph: ProductGraph, inbox: Inbox) -> LeafGrads:
        (tree,) = graph.outputs.trees
        grads = self._grads[chunk]
        root_grads = [grad for tensor, grad in zip(tree.tensors, grads, strict=True) if tensor.requires_grad]
        back, tangents = run.pull_end(graph, inbox.tangents, tuple(root_grads))
        root_tangents = iter(tangents)
        self._outputs[chunk] = tuple([next(root_tangents) if tensor.requires_grad else None for tensor in tree.tensors])
        return back

    def pull(self, run: StageRule, chunk: int, graph: ProductGraph, inbox: Inbox, groups: list[Grads]) -> LeafGrads:
        first, *seconds = groups
        return run.pull_second(graph, inbox.tangents, first, seconds, False)
