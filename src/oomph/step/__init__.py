"""What a training step does: operations, and the sources of op lists."""
