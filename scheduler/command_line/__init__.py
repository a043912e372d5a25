"""The command line of schedules: `penstock schedules`, and `python -m scheduler`.

    words --click--> commands.py (options.py: words become a Schedule, Costs, numbers) --> tables, files
    running.py: what goes wrong becomes words on stderr, and an exit status
"""
