"""The execution of one call: its plan, its drivers, and the mailbox of values between actions.

Imports common, data, gradients, recompute, stage and transports.
"""
