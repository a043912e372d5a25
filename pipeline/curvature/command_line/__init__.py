"""`python -m pipeline curvature`."""
