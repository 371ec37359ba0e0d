"""A config put on a device: the plan, its notes, and what holds the peak memory. `oomph.plan` is the public face."""
