"""Who is timed: the yardstick, this package's tables, torch's modules, FBGEMM's tables."""
