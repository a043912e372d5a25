"""The command line of curvature: `penstock curvature`.

    words --command.py (click)--> options --target.py--> operator --answers.py--> stdout and files
"""
