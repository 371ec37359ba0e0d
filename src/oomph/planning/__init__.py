"""A config put on a device: the plan, its notes, and who holds the peak. `oomph.plan` is the public face."""
