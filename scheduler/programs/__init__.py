"""Programs: schedules with the messages between their lanes.

    Schedule --lowering.py--> program.py --message_checks.py--> right, and free of deadlock
"""
