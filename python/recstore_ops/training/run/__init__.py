"""A run from its configuration to its checkpoints, and what is done with a finished one."""
