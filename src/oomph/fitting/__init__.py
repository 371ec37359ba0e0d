"""Which setting fits, which is the fastest, and by how much: the search behind `oomph fit`."""
