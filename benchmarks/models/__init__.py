"""The models of the benchmarks, small enough for two cores."""
