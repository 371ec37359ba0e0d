"""Predictions from a list of operations: allocated and reserved memory, seconds, energy and money."""
