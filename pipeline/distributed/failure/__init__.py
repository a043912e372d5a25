"""Failure detection: a waiting rank learns that another has failed, went silent, or will not enter the call."""
