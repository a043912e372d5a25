"""Activation checkpointing: what is dropped, what a recomputation must find as it was, and what it must give.

Imports common and data.
"""
