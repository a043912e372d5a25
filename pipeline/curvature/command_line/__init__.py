"""The command line of curvature: `penstock curvature`.

    words --command.py (click)--> Request --target.py--> operator --answers.py--> stdout and files
"""
