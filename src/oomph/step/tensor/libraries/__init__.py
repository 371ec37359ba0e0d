"""Kernels of other libraries that models and programs use, each with what it allocates and saves."""
