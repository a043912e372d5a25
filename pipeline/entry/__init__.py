"""The methods of a Pipe: forward, step, eager step, evaluate, state; and the validation of their arguments.

Imports all rooms but curvature.
"""
