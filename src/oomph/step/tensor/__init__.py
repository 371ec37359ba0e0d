"""A tensor library without data: shapes, strides, dtypes, references, and PyTorch's autograd. No torch."""
