"""One lane in this process: what moves between ranks, who agrees on what, who notices a failure.

Imports all rooms but entry and curvature.
"""
