"""What the columns of a file are for: by name, with a type and a role."""
