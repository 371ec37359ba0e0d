"""What torch.compile makes of a step: its graph, what forward saves, kernels, their order, memory used again."""
