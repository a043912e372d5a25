"""Which schedule is the shortest for these costs and this memory? `searching.py` begins; the others are its parts."""
