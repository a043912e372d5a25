"""What a Pipe saves and loads: its own state, optimizers' state by name, values for layers on the meta device."""
