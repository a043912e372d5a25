"""One call: which stage runs which action when, and where values are in between.

Imports common, data, recompute, stage and transports.
"""
