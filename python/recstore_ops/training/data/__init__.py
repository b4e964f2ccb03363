"""Labelled rows: the formats of files, what their columns are for, batches, and the streams that they come from."""
