"""Benches: how near lookups and steps come to what the memory allows, and how they compare with other tables."""
