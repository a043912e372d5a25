"""The foundation of all rooms: errors, checks of arguments, torch's switches, deferred interrupts.

Imports no other room.
"""

from pipeline.common.neighbours import check_neighbours

check_neighbours()
