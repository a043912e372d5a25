"""What is sent between the lanes, and when?

    Schedule --lowering.py--> program.py --message_checks.py, rendezvous.py--> right, and free of deadlock
"""
