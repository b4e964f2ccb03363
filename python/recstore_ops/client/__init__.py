"""Programs without modules: tables by name, tensors over a table, push and pull."""
