"""A tensor library without numbers: shapes, strides, dtypes, who holds what, and PyTorch's autograd. No torch."""
