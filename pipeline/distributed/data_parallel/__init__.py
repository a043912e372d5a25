"""Several copies of a pipeline: the means of their gradients."""
