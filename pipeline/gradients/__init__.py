"""Gradients of several passes, segments and ranks: stores, sums, updates during the backward.

Imports common.
"""
