"""Estimates from products: eigenpairs, traces, diagonals, densities, linear systems."""
