"""Bundles that stay as new as a model in training: publishing a model, and following its publication."""
