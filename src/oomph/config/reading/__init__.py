"""Readers of config files, a module for each format: every one returns a `Layer`. `files` knows which it is."""
