"""The operators, and what tracing needs to know of them."""
