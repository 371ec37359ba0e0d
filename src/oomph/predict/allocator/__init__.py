"""PyTorch's CUDA caching allocator, simulated: from what a program allocates to what it reserves."""
