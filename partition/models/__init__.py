"""Models as nn.Sequential: of any model that calls modules one after the other, layers that hold its own modules.

It imports names and errors of the package, and nothing else of it.
"""
