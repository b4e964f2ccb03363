"""How a table is described, and the configuration file."""
