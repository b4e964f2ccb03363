"""Rows that are generated, with known bounds of what models can reach on them."""
