"""Memory snapshots as PyTorch records them: read and written."""
