"""The cut of a mini-batch into chunks (scatter), and the join of their outputs (gather).

    x [rows, ...] --scatter--> chunk 0 [rows/chunks, ...], chunk 1, ...      along dim 0, as even as can be
    outputs of the chunks --gather--> y [rows, ...]

Tensors are cut; NoChunk(value) and plain values go whole to every chunk. The number of chunks that run is
min(chunks, rows).

`batch_dim` says which dim counts the rows, of everything that is cut and joined: of inputs, targets and outputs. With
batch_dim=1, [time, rows, ...] is cut along dim 1. A tensor with too few dims for that has one value for each row (the
lengths of sequences, class labels) and is cut along dim 0. Sizes do not matter: they may be equal by chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from partition.contents import tensors_in
from partition.rows import NoChunk, row_dim
from pipeline.common.torch_modes import without_function_modes
from pipeline.data.pytrees import Activations, Grads, Tree, add_grads, detached, flatten, memory_of, same_structure
from pipeline.data.values import CALLER


@dataclass(frozen=True, eq=False)
class Batch:
    """A mini-batch that is cut, or several, one after the other, each cut by itself.

    Attributes:
        tree: the mini-batch, or the first.
        cut: whether each of its tensors is cut; else it goes whole to every chunk.
        rows: of each chunk.
        pieces: for each tensor its part in each chunk.
        batch_dim: the dim that counts rows.
        parts: the mini-batches, where there are several.
    """

    tree: Tree
    cut: tuple[bool, ...]
    rows: tuple[int, ...]
    pieces: tuple[tuple[Tensor, ...], ...]
    batch_dim: int = 0
    parts: tuple[Batch, ...] = ()

    @property
    def chunks(self) -> int:
        return len(self.rows)

    @property
    def mini_batches(self) -> tuple[Batch, ...]:
        """The mini-batches, also where there is but one."""
        return self.parts or (self,)

    @property
    def tensors(self) -> list[Tensor]:
        """Those of all mini-batches, uncut."""
        return [tensor for part in self.mini_batches for tensor in part.tree.tensors]

    def message(self, chunk: int, grad: bool) -> Activations:
        """Chunk `chunk`, detached; with `grad`, tensors that require a gradient say so."""
        pieces = [piece[chunk] for piece in self.pieces]
        needs = tuple(grad and tensor.requires_grad for tensor in self.tree.tensors)
        return Activations(Tree(detached(pieces), self.tree.skeleton), needs, memory_of(pieces, {}, CALLER, chunk))

    def cut_alike(self, index: int, whole: Tensor | None) -> list[Tensor]:
        """A tensor that belongs to tensor `index`, cut as that is. None: zeros."""
        pieces = self.pieces[index]
        if whole is None:
            return [torch.zeros_like(piece) for piece in pieces]
        if not self.cut[index]:
            return [whole for _ in pieces]
        dim = row_dim(whole, self.batch_dim)
        return list(torch.split(whole, [piece.shape[dim] for piece in pieces], dim))

    def value(self, chunk: int) -> Any:
        """Chunk `chunk` as the value it is a part of."""
        return self.tree.build([piece[chunk] for piece in self.pieces])

    def joined(self, chunks: Sequence[int]) -> Any:
        """Some chunks as one."""
        with without_function_modes():
            tensors = [
                torch.cat([piece[chunk] for chunk in chunks], row_dim(piece[0], self.batch_dim)) if cut else piece[0]
                for piece, cut in zip(self.pieces, self.cut, strict=True)
            ]
        return self.tree.build(tensors)

    def is_joinable(self, chunks: Sequence[int]) -> bool:
        """Whether some chunks can be one: of several mini-batches only such as differ in nothing but their rows."""
        if not self.parts:
            return True
        columns = [([piece[chunk] for chunk in chunks], cut) for piece, cut in zip(self.pieces, self.cut, strict=True)]
        return all([
            are_joinable(column, self.batch_dim) if cut else all([tensor is column[0] for tensor in column])
            for column, cut in columns
        ])

    def join_grads(self, grads: Sequence[Grads]) -> Grads:
        """From gradients per chunk to gradients of the whole tensors, in the order of `tree.tensors`."""
        columns = zip(zip(*grads, strict=True), self.pieces, self.cut, strict=True)
        return tuple([
            joined_grads(column, pieces, self.batch_dim) if cut else reduce(add_grads, column)
            for column, pieces, cut in columns
        ])


def joined_grads(grads: Sequence[Tensor | None], pieces: Sequence[Tensor], batch_dim: int) -> Tensor | None:
    """The gradients of some pieces as that of the whole; None counts as zeros, unless all are None."""
    if all([grad is None for grad in grads]):
        return None
    filled = [torch.zeros_like(piece) if grad is None else grad for piece, grad in zip(pieces, grads, strict=True)]
    with without_function_modes():
        return filled[0] if len(filled) == 1 else torch.cat(filled, row_dim(pieces[0], batch_dim))


def are_joinable(column: Sequence[Tensor], batch_dim: int) -> bool:
    """Whether tensors have one shape but for their rows."""
    dim = row_dim(column[0], batch_dim)
    return len({(*tensor.shape[:dim], -1, *tensor.shape[dim + 1 :]) for tensor in column}) == 1


def scatter(value: Any, chunks: int, name: str = "the input", batch_dim: int = 0) -> Batch:
    """Cut a mini-batch into at most `chunks` chunks, as even as can be.

    Args:
        value: a pytree; tensors have their rows along `batch_dim`, the same number each.
        chunks: the number of chunks, if there are as many rows.
        name: how an error names the value.
        batch_dim: the dim that counts rows; of tensors with fewer dims dim 0 does.

    Raises:
        TypeError: a leaf cannot be cut and is no plain value.
        ValueError: nothing to cut, a tensor without dimensions, tensors of different length, no rows.
    """
    tree, cut = _take_apart(value, name)
    rows = _rows(tree, cut, name, batch_dim)
    return _batch(tree, cut, _even(rows, min(chunks, rows)), batch_dim)


def scatter_like(value: Any, batch: Batch, name: str) -> Batch:
    """Cut a value (a target) at the rows where `batch` is cut; a value without tensors goes whole to every chunk."""
    tree, cut = _take_apart(value, name)
    if any(cut):
        rows = _rows(tree, cut, name, batch.batch_dim)
        if rows != sum(batch.rows):
            raise ValueError(
                f"{name} has {rows} rows but the input has {sum(batch.rows)}. Give one row of {name} for each row of "
                "the input, or mark what belongs to the whole batch with NoChunk(...)."
                + (_where(batch.batch_dim) if batch.batch_dim else "")
            )
    return _batch(tree, cut, batch.rows, batch.batch_dim)


def halved(batch: Batch) -> Batch:
    """A mini-batch of one chunk as two chunks."""
    return _batch(batch.tree, batch.cut, _even(sum(batch.rows), 2), batch.batch_dim)


def consecutive(parts: Sequence[Batch], name: str) -> Batch:
    """Several mini-batches, whose chunks run one after the other.

    Args:
        parts: the mini-batches, at least one.
        name: how an error names their values.

    Raises:
        ValueError: they differ in structure, in plain values, or in what goes whole to every chunk.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    for number, part in enumerate(parts):
        if part.cut != first.cut or not same_structure(part.tree, first.tree):
            raise ValueError(
                f"mini-batches of one step differ: {name} of mini-batch 0 is {described(first)}, that of mini-batch "
                f"{number} is {described(part)}. Give all the same structure and the same plain values; tensors may "
                "differ in shape."
            )
    rows = tuple([row for part in parts for row in part.rows])
    pieces = tuple([sum(columns, ()) for columns in zip(*[part.pieces for part in parts], strict=True)])
    return Batch(first.tree, first.cut, rows, pieces, first.batch_dim, tuple(parts))


def gather(trees: Sequence[Tree], rows: Sequence[int], batch_dim: int = 0) -> tuple[Tree, tuple[tuple[int, ...], ...]]:
    """Join the outputs of the chunks along the dim that counts rows.

    Args:
        trees: the output of each chunk, taken apart.
        rows: the rows of each chunk of the input.
        batch_dim: the dim that counts rows; of tensors with fewer dims dim 0 does.

    Returns:
        The joined output, and for each of its tensors the number of rows from each chunk.

    Raises:
        ValueError: the outputs cannot be joined: other structures, plain values that differ, tensors without
            dimensions, or numbers of rows that do not follow the input's.
    """
    first = trees[0]
    if len(trees) == 1:
        dims = [row_dim(tensor, batch_dim) for tensor in first.tensors]
        return first, tuple(
            (tensor.shape[dim] if tensor.dim() else 1,) for tensor, dim in zip(first.tensors, dims, strict=True)
        )
    check_structure(trees, rows)
    columns = [tuple(tree.tensors[index] for tree in trees) for index in range(len(first.tensors))]
    for column in columns:
        if not are_joinable(column, batch_dim):
            raise ValueError(
                f"the outputs of the chunks cannot be joined: their shapes are {[list(part.shape) for part in column]}"
                ", which differ in more than the rows. Return tensors of one shape, or leave outputs=True out."
            )
    sizes = tuple(row_sizes(column, rows, batch_dim) for column in columns)
    with without_function_modes():
        joined = [torch.cat(column, row_dim(column[0], batch_dim)) for column in columns]
        return Tree(tuple(joined), first.skeleton), sizes


def check_structure(trees: Sequence[Tree], rows: Sequence[int]) -> None:
    """See that the outputs of chunks of so many rows differ in their tensors only.

    Raises:
        ValueError: they differ in more: a list has an entry for each row, say.
    """
    first = trees[0]
    for chunk, (tree, count) in enumerate(zip(trees, rows, strict=True)):
        if not same_structure(first, tree) or len(tree.tensors) != len(first.tensors):
            raise ValueError(
                f"the outputs of chunks of {rows[0]} and {count} rows cannot be joined: chunk 0 gave "
                f"{tree_text(first)} and chunk {chunk} gave {tree_text(tree)}. Return the same structure and the same "
                "plain values for every chunk, and no list with an entry for each row (a model that is cut with "
                'to_sequential(..., output=lambda out: out["logits"]) returns that alone), or use chunks=1.'
            )


def row_sizes(column: Sequence[Tensor], rows: Sequence[int], batch_dim: int) -> tuple[int, ...]:
    """The sizes of an output's parts along the dim that counts rows.

    Args:
        column: the parts, one for each chunk.
        rows: the rows of each chunk of the input.
        batch_dim: the dim that counts rows.

    Raises:
        ValueError: they do not grow with the rows, or have no dim.
    """
    shapes = [list(tensor.shape) for tensor in column]
    if any(tensor.dim() == 0 for tensor in column):
        raise ValueError(
            "an output without dimensions cannot be joined along dim 0: every chunk gave a 0-d tensor. Their mean or "
            "their sum could be meant. Return one value per row, or compute the loss in "
            "pipe.step(x, target, loss_fn=...)."
        )
    dim = row_dim(column[0], batch_dim)
    sizes = tuple(tensor.shape[dim] if tensor.dim() > dim else 0 for tensor in column)
    if sizes[0] % rows[0] or any(size * rows[0] != sizes[0] * row for size, row in zip(sizes, rows, strict=True)):
        raise ValueError(
            f"an output cannot be joined along dim {dim}: chunks of {list(rows)} rows gave shapes {shapes}, which do "
            f"not grow with the rows. Return outputs whose dim {dim} counts rows (of nn.GRU, h_n.transpose(0, 1)), or "
            "use chunks=1."
        )
    return sizes


def refuse_layouts(outputs: Iterable[Tensor]) -> None:
    """Raise where the gradient of an output could not be cut into those of the chunks.

    Args:
        outputs: those that require a gradient.

    Raises:
        TypeError: one is sparse.
    """
    for tensor in outputs:
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"an output of layout {tensor.layout} and shape {list(tensor.shape)} requires a gradient, which torch "
                "cannot cut into those of the chunks. Return x.to_dense() from the last layer."
            )


def tree_text(tree: Tree) -> str:
    """A tree in words: tensors by shape, plain values as they are."""
    shapes = [_ShownShape(tensor) for tensor in tree.tensors]
    try:
        return str(tree.build(shapes))  # type: ignore[arg-type]
    except Exception:  # a container of the user's own that looks at the tensors it is given
        return f"a container of {shapes}"


def described(batch: Batch) -> str:
    """Mini-batches in words: the structure, and of each tensor shape, dtype and whether it requires a gradient."""
    if batch.parts:
        return "; ".join(map(described, batch.parts))
    tree = batch.tree
    leaves = ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{'' if cut else ' whole'}"
        f"{' with gradient' if tensor.requires_grad else ''}"
        for tensor, cut in zip(tree.tensors, batch.cut, strict=True)
    )
    structure = [] if tree.skeleton is None else [tree_text(tree)]
    return " of ".join([*structure, leaves] if leaves else structure)


class _ShownShape:
    def __init__(self, tensor: Tensor) -> None:
        self._text = f"Tensor{list(tensor.shape)}"

    def __repr__(self) -> str:
        return self._text


def _take_apart(value: Any, name: str) -> tuple[Tree, tuple[bool, ...]]:
    """A tree without its NoChunk marks, and which of its tensors are cut."""
    if isinstance(value, Tensor):
        return flatten(value, name), (True,)
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda leaf: isinstance(leaf, (NoChunk, PackedSequence)))
    if any([isinstance(leaf, PackedSequence) for leaf in leaves]):
        raise TypeError(
            f"{name} holds a PackedSequence, which lies by time steps: it has no dim that counts rows. Give the padded "
            "tensor and its lengths, and pack them within the first layer; between layers it may be packed. One that "
            "every chunk needs whole stands in NoChunk(...)."
        )
    whole_ids = {id(tensor) for leaf in leaves if isinstance(leaf, NoChunk) for tensor in tensors_in(leaf.value)}
    doubles = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) in whole_ids]
    if doubles:
        raise ValueError(f"a tensor of shape {list(doubles[0].shape)} stands in {name} both bare and in NoChunk(...).")
    unmarked = pytree.tree_unflatten([leaf.value if isinstance(leaf, NoChunk) else leaf for leaf in leaves], spec)
    tree = flatten(unmarked, name)
    return tree, tuple(id(tensor) not in whole_ids for tensor in tree.tensors)


def _rows(tree: Tree, cut: Sequence[bool], name: str, batch_dim: int) -> int:
    tensors = [tensor for tensor, is_cut in zip(tree.tensors, cut, strict=True) if is_cut]
    if not tensors:
        raise ValueError(
            f"{name} has nothing to cut: no tensor outside NoChunk(...) in {tree_text(tree)}. Give at least one "
            f"tensor whose dim {batch_dim} counts the rows of the mini-batch."
        )
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{name} holds a 0-d tensor, which cannot be cut along dim 0. Wrap it: NoChunk(tensor).")
    lengths = sorted({tensor.shape[row_dim(tensor, batch_dim)] for tensor in tensors})
    if len(lengths) > 1:
        raise ValueError(
            f"{name} holds tensors of different length: {tree_text(tree)} (rows: {lengths}). All tensors are cut "
            f"along dim {batch_dim} and need the same number of rows. Transpose those with rows in another dim (the "
            "state of an RNN), and back in the layer; wrap those that every chunk needs whole in NoChunk(...). Of a "
            "list with an entry for each row pad the entries and stack them; a target may stay a list in "
            "loss_fn(pipe(x), target).backward(). A list of mini-batches (x, target) is given as iter(list)."
            + (_where(batch_dim) if batch_dim else "")
        )
    if lengths[0] == 0:
        raise ValueError(f"{name} has 0 rows: {tree_text(tree)}. A mini-batch needs at least one row.")
    return lengths[0]


def _where(batch_dim: int) -> str:
    return (
        f" With batch_dim={batch_dim} rows are counted by dim {batch_dim}, of a tensor with fewer dims by dim 0: give "
        "[time, rows], not [rows, classes] or what is flattened to one dim; loss_fn may transpose and flatten."
    )


def _batch(tree: Tree, cut: tuple[bool, ...], rows: tuple[int, ...], batch_dim: int) -> Batch:
    pieces = [_pieces(tensor, len(rows), is_cut, batch_dim) for tensor, is_cut in zip(tree.tensors, cut, strict=True)]
    return Batch(tree, cut, rows, tuple(pieces), batch_dim)


def _pieces(tensor: Tensor, count: int, cut: bool, batch_dim: int) -> tuple[Tensor, ...]:
    if not cut or count == 1:
        return (tensor,) * count
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"a tensor of layout {tensor.layout} and shape {list(tensor.shape)} cannot be cut into {count} chunks. "
            "Give x.to_dense(), or chunks=1; one that every chunk needs whole stands in NoChunk(...)."
        )
    dim = row_dim(tensor, batch_dim)
    pieces = torch.tensor_split(tensor, count, dim)
    return tuple(pieces) if dim == 0 else tuple([piece.contiguous() for piece in pieces])  # laid out as the whole


def _even(rows: int, count: int) -> tuple[int, ...]:
    """The lengths that `torch.tensor_split` gives: the first rows % count chunks have one row more."""
    return tuple(rows // count + (chunk < rows % count) for chunk in range(count))
