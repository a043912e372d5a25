"""The comparison of a call's ranks: of what they call, its settings, its mini-batch, the gradients it begins with.

    open        digests of the descriptions; of the mini-batch, if it is on the host             all to all
    agree       of the mini-batch else; of the gradients of the output                            all to all
    a mismatch  the descriptions                                                                  all to all
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from pipeline.distributed.agreement import (
    LOADS,
    MINI_BATCHES,
    MODES,
    OPTIONS,
    SCALES,
    VALUES,
    MismatchError,
    difference,
    digest,
)
from pipeline.distributed.digests import Fingerprint, GradSketch, Sketches
from pipeline.distributed.topology import PipeTopology
from pipeline.execution.communicator import CommonTensors, Describe

_SECOND = (
    " All ranks make a second backward, or none does: what each rank differentiates must depend on gradients that it "
    "took with create_graph=True, of the same calls (add 0 * grad.sum() where it does not; freeze the parameters of a "
    "rank whose gradients are all None), and be differentiated by its parameters or by x."
)
_GENERATORS = (
    " The ranks' default generators are not alike: each draws other numbers. What a rank draws for its own parameters "
    "(initial values, noise) it draws before Pipe(...), for all of the model, or from a generator of its own."
)
_REMEDIES = {  # by what differs
    MODES: " Use the same autocast, and call pipe.train() or pipe.eval(), on every rank.",
    LOADS: (
        " Call pipe.load_state_dict(state) on every rank: each takes its part. (What full_state_dict() gives to rank 0 "
        "alone, torch.distributed.broadcast_object_list sends to the others.)"
    ),
    SCALES: " Load the scaler's state_dict on every rank.",
}


class Comparison:
    """The facts that the ranks of one call must have in common.

    Args:
        topology: the topology.
        calls: the call, in words: entry point, Pipe and number.
    """

    def __init__(self, topology: PipeTopology, calls: str) -> None:
        self._topology = topology
        self._calls = calls
        self._describe: Describe = lambda values: {}
        self._mini_batch = Fingerprint(())
        self._is_mini_batch_compared = True
        self._sketches = Sketches(())  # of the gradients of the output
        self._difference_text = ""  # the words where these differ

    def open(self, words: Describe, seed: int, tensors: CommonTensors, values: bool) -> tuple[int, int]:
        """Compare the calls.

        Args:
            words, tensors: see `Communicator.open`.
            seed: this rank's.
            values: whether to compare all values of the mini-batch.

        Returns:
            The seed of the call, which is rank 0's, and a digest of what decides which messages are sent.

        Raises:
            MismatchError: the ranks make different calls.
        """
        self._describe, self._difference_text = words, tensors.words
        self._mini_batch, self._sketches = Fingerprint(tensors.mini_batch), Sketches(tensors.output_grads)
        descriptions = self._descriptions(values)
        fingerprint = self._mini_batch.number if self._mini_batch.is_on_host else 0
        rows = self._topology.ranks.exchange([seed, fingerprint, digest("\0".join(descriptions.values()))])
        if any(row[2:] != rows[0][2:] for row in rows) or len({row[1] for row in rows} - {0}) > 1:
            self._refuse([row[0] for row in rows])
        self._is_mini_batch_compared = all(row[1] for row in rows)
        return rows[0][0], digest(descriptions.get(OPTIONS, "") + descriptions.get(MINI_BATCHES, ""))

    def _descriptions(self, values: bool) -> dict[str, str]:
        return {"the calls": self._calls, **self._describe(values)}

    def _refuse(self, seeds: Sequence[int] = ()) -> NoReturn:
        """Raise on all ranks, after digests differed: exchange the descriptions. `seeds`: those that were drawn."""
        descriptions = self._descriptions(True)
        by_rank = self._topology.ranks.exchange(descriptions)
        first_difference = difference(by_rank)
        remedy = "".join([remedy for name, remedy in _REMEDIES.items() if first_difference.startswith(name)])
        generators = _GENERATORS if first_difference.startswith(VALUES) and len(set(seeds)) > 1 else ""
        second = _SECOND if any("second backward" in str(theirs) for theirs in by_rank) else ""
        raise MismatchError(
            f"{first_difference}.{remedy} All ranks run the same script: the same Pipe, the same calls in "
            "the same order, the same mini-batches. Set torch.manual_seed(...) at its top, and give samplers and "
            "generators the same seed on every rank; no DistributedSampler, which gives each its own part: that is for "
            f"a pipeline in each process, Pipe(..., devices=[...]).{generators}{second}"
        )

    def values(self) -> list[Any]:
        """The values still to be compared: of the mini-batch, if not all had its fingerprint; of output gradients."""
        mini_batch = 0 if self._is_mini_batch_compared else self._mini_batch.number
        return [mini_batch, *self._sketches.values]

    def compare(self, rows: Sequence[Sequence[Any]]) -> None:
        """Check once that all ranks' values are alike.

        Raises:
            MismatchError: they are not.
        """
        if len({mini_batch for mini_batch, *_ in rows}) > 1:
            self._refuse()
        for index in range(len(rows[0]) - 1):
            sketches = [GradSketch(*row[index + 1]) for row in rows]
            if not all(sketch.is_like(sketches[self._topology.assignment.last]) for sketch in sketches):
                described = "; ".join(f"rank {rank}: {sketch}" for rank, sketch in enumerate(sketches))
                raise MismatchError(self._difference_text.format(index, described))
        self._is_mini_batch_compared, self._sketches = True, Sketches(())
