"""The data of a Pipe: pytrees, micro-batches, losses and metrics.

Imports common (and pipeline.skip for the values that pass stages by).
"""
