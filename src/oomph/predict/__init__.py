"""What follows from a list of operations: memory, reserved memory, seconds, energy and money."""
