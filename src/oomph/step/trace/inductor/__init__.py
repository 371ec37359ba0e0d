"""Inductor's plan for a model, read without a compiler."""
