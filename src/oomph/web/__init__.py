"""The local page and its API: `oomph serve`."""
