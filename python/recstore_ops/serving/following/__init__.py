"""Bundles that stay as new as a model in training: what a trainer publishes, and those who follow it."""
