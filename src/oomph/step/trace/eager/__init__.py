"""A run on fake tensors, recorded operation by operation."""
