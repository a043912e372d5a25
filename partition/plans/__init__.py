"""Plans: how to cut, schedule and recompute a model on given devices, by simulating what there is to choose from."""
