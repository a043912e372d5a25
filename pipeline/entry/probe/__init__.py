"""The probe: whether a mini-batch may be cut into chunks, found by forwards of a few of its rows."""
