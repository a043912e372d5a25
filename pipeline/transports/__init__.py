"""Ways to move bytes and tensors from one place to another: a file for each, and the suite that all of them pass.

Imports common and data.
"""
