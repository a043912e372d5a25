"""The messages of a product: values with their tangents forward, gradients with theirs back.

    forward    the tensors of a value, then for each direction the tangents of those that depend on a parameter
    back       for each of these tensors the loss's gradient, where it is sent, then for each direction the product's
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from pipeline.data.pytrees import Activations, Bundle, Grads, MemoryId, T, Tree, parts_of


class Inbox(NamedTuple):
    """The values of a chunk that a stage reads.

    Attributes:
        values: without tangents.
        needs: for each tensor whether it depends on a parameter of the space.
        tangents: for each direction those of the tensors that do.
        memory: the identity of each tensor's memory.
    """

    values: Bundle
    needs: tuple[bool, ...]
    tangents: list[list[Tensor]]
    memory: tuple[MemoryId, ...]

    @classmethod
    def of(cls, messages: Sequence[Activations], count: int) -> Inbox:
        """Take messages apart. `count`: the number of directions."""
        trees: list[Tree] = []
        tangents: list[list[Tensor]] = [[] for _ in range(count)]
        for tree, needs, _, _ in messages:
            values, *others = parts_of(tree.tensors, [len(needs), *[sum(needs)] * count])
            trees.append(Tree(tuple(values), tree.skeleton))
            for direction, part in zip(tangents, others, strict=True):
                direction.extend(part)
        needs = tuple([need for message in messages for need in message.needs_grad])
        memory = tuple([memory_id for message in messages for memory_id in message.memory])
        return cls(Bundle.of(tuple(trees)), needs, tangents, memory)


def outbox(
    outputs: Bundle, tensors: Sequence[Tensor], tangents: Sequence[Sequence[Tensor]], memory: Sequence[MemoryId]
) -> list[Activations]:
    """The messages of detached `tensors`, which are those of `outputs`, with the tangents of those that have some."""
    needs = outputs.split([tensor.requires_grad for tensor in outputs.tensors])
    lives = [sum(tree_needs) for tree_needs in needs]
    tree_tangents = _regrouped([parts_of(direction, lives) for direction in tangents], len(lives))
    parts = zip(outputs.trees, outputs.split(tensors), tree_tangents, needs, outputs.split(memory), strict=True)
    return [
        Activations(Tree((*values, *along), tree.skeleton), tuple(needs_grad), tuple(memory_ids))
        for tree, values, along, needs_grad, memory_ids in parts
    ]


class LeafGrads(NamedTuple):
    """The gradients that go back from a stage.

    Attributes:
        groups: at each leaf the loss's gradient, where it is sent, and then each direction's product.
        derivative: of the first direction all parts, at the leaves and at the parameters, where it is to be checked.
    """

    groups: list[Grads]
    derivative: Grads = ()

    def messages(self, inbox: Inbox) -> list[Grads]:
        """From groups over all leaves to one message for each value that was read."""
        lives = [sum(needs) for needs in inbox.values.split(inbox.needs)]
        return _regrouped([parts_of(group, lives) for group in self.groups], len(lives))


def grad_groups(messages: Sequence[Grads], lives: Sequence[int], count: int) -> list[Grads]:
    """From the messages that came back to groups over all roots, as `LeafGrads.messages` made them.

    Args:
        messages: for each value that a stage made. Empty: no reader has any gradient.
        lives: the number of its tensors that depend on a parameter.
        count: the number of groups.
    """
    filled = [grads or (None,) * (live * count) for grads, live in zip(messages, lives, strict=True)]
    columns = [parts_of(grads, [live] * count) for grads, live in zip(filled, lives, strict=True)]
    return _regrouped(columns, count)


def _regrouped(columns: Sequence[Sequence[Sequence[T]]], count: int) -> list[tuple[T, ...]]:
    """For each of so many places the parts that stand there in all columns, as one."""
    return [tuple([entry for column in columns for entry in column[place]]) for place in range(count)]
