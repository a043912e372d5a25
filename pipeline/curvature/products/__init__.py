"""The computation of a product: the stage rule, and a call that runs it through the schedule."""
