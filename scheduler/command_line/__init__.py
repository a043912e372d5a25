"""What does `python -m scheduler` understand, and what does it do?

    words --options.py--> arguments.py --> commands.py --> tables.py, files
"""
