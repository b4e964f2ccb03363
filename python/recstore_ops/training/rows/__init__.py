"""Labelled rows: batches, and the streams that they come from."""
