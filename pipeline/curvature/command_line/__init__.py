"""The command line of curvature: `penstock curvature`.

    words --command.py (click)--> options --answers.py--> operator --> stdout and files
"""
