"""What every room stands on: errors, checks of arguments, torch's switches, interrupts that wait.

Imports no other room.
"""
