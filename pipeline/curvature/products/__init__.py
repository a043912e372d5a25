"""How is a product computed: the stage rule, and a call that runs it through the schedule."""
