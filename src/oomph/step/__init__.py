"""What a training step does: operations, and where lists of them come from."""
