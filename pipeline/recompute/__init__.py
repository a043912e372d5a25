"""Activation checkpointing: the policy, the state that a recomputation must find, and the check of its outputs.

Imports common and data.
"""
