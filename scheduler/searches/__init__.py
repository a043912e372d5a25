"""The search for the shortest schedule for given costs and memory. `searching.py` begins; the others are its parts."""
