"""What the methods of a Pipe do: forward, step, eager step, evaluate, state; and what they refuse.

Imports all rooms but curvature.
"""
