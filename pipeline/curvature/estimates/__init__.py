"""What products tell: eigenpairs, traces, diagonals, densities, linear systems."""
