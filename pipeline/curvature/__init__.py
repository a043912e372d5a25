"""Curvature of a model that is cut over devices or ranks, from Hessian, Gauss-Newton and Fisher products.

    from pipeline.curvature import Hessian
    H = Hessian(pipe, (x, y), loss_fn)
    H @ v
"""

from pipeline.curvature.checking import Report
from pipeline.curvature.estimates.resume import ResumeError
from pipeline.curvature.estimates.solve import ConvergenceError, Inverse
from pipeline.curvature.estimates.systems import IndefiniteError
from pipeline.curvature.operators import EmpiricalFisher, GaussNewton, Hessian
from pipeline.curvature.results.result import Result
from pipeline.curvature.results.sharpness import SharpnessHistory

__all__ = [
    "ConvergenceError",
    "EmpiricalFisher",
    "GaussNewton",
    "Hessian",
    "IndefiniteError",
    "Inverse",
    "Report",
    "Result",
    "ResumeError",
    "SharpnessHistory",
]
