"""Profiles: the time and memory of each layer of an nn.Sequential, measured in a copy or counted without a run."""
