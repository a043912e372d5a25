"""One stage during one call: its forward, its backward, its parameters, its graph.

Imports common, data and recompute (and pipeline.skip).
"""
