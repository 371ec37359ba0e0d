"""`oomph serve`: the local page and its API."""
