"""Op lists of any model, from PyTorch itself on fake tensors: the oracle, and the path for undescribed models."""
