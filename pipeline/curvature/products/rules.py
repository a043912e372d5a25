"""The names of the matrices, see matrices.py."""

from __future__ import annotations

from enum import Enum


class Rule(Enum):
    """The matrices, with their names."""

    HESSIAN = "Hessian"
    GAUSS_NEWTON = "Gauss-Newton"
    FISHER = "empirical Fisher"
