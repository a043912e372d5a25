"""What does a schedule look like in a paper?

    Schedule or Timeline --figure.py--> rows.py, frame.py (axis.py, palette.py) --> SVG
"""
