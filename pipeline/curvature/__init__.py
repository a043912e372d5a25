"""Curvature of a model that is cut over devices or ranks: what Hessian, Gauss-Newton and Fisher products tell.

    from pipeline.curvature import Hessian
    H = Hessian(pipe, (x, y), loss_fn)
    H @ v
"""

from pipeline.curvature.operators import EmpiricalFisher, GaussNewton, Hessian

__all__ = ["EmpiricalFisher", "GaussNewton", "Hessian"]
