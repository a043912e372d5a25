"""The state that a Pipe saves and loads: its own, optimizers' by name, values for layers on the meta device."""
