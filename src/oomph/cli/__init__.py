"""The command: one verb a job; parse, call, print."""
