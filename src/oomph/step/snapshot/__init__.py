"""Memory snapshots as PyTorch records them: reading and writing."""
