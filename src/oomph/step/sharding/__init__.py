"""One rank of a step that several devices share: one device's op list, rewritten as PyTorch's source does it."""
