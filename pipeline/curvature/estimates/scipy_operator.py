"""The scipy LinearOperator of a matrix that is known by its products.

    numpy [n, k] --> torch [n, k] --A @, a block of columns at a time--> torch [n, k] --> numpy [n, k]

For one process: scipy holds whole vectors, in the memory of the CPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from pipeline.curvature.linear import LinearMap


def to_scipy(A: LinearMap, dtype: Any = None) -> Any:
    """A as a `scipy.sparse.linalg.LinearOperator`, for scipy's eigsh, svds, cg, minres, gmres, expm_multiply ...

    The order of the n entries: the parameters one after the other, in the order of `A.space.named(...)`, each flattened
    as `tensor.ravel()` does.

    Args:
        A: a symmetric matrix.
        dtype: numpy's, of what the operator returns; that of A's vectors if None. Products are computed in A's.

    Returns:
        A `scipy.sparse.linalg.LinearOperator` of shape (n, n). Its products with a matrix take `A.block` columns at a
        time.

    Raises:
        ValueError: several processes share the vectors.
        ImportError: scipy is not installed.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> model = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
        >>> x, y = torch.diag(torch.tensor([1.0, 2.0, 3.0])).double(), torch.zeros(3, 1).double()
        >>> H = Hessian(model, (x, y), nn.MSELoss(reduction="sum"))  # diag(2, 8, 18)
        >>> (to_scipy(H) @ [1.0, 1.0, 2.0]).tolist()
        [2.0, 8.0, 36.0]
    """
    if A.space.ranks != 1:
        raise ValueError(
            f"{A.space.ranks} ranks share the vectors of {A.name}, and scipy needs them whole in one process. "
            "Use top_eigenpairs, density or solve, which leave the vectors where they are; or one process."
        )
    try:
        linalg = importlib.import_module("scipy.sparse.linalg")
    except ImportError as error:
        raise ImportError("to_scipy needs scipy, which is not installed: pip install scipy") from error
    numpy = importlib.import_module("numpy")
    result_dtype = numpy.dtype(str(A.space.dtype).removeprefix("torch.") if dtype is None else dtype)

    def matmat(columns: Any) -> Any:
        if numpy.iscomplexobj(columns):
            raise TypeError(f"{A.name} takes real vectors: multiply the real and the imaginary part on their own")
        vectors = torch.from_numpy(numpy.array(columns, numpy.float64))
        return torch.cat([A @ block for block in vectors.split(A.block, 1)], 1).numpy().astype(result_dtype)

    def matvec(column: Any) -> Any:
        return matmat(column.reshape(-1, 1))[:, 0]

    shape = (A.space.size, A.space.size)
    return linalg.LinearOperator(shape, matvec, rmatvec=matvec, matmat=matmat, rmatmat=matmat, dtype=result_dtype)
