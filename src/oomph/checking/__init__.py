"""`oomph check`: run a few real steps of a config and compare what they took with the plan."""
