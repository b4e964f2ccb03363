"""Modules, collections, their functional forms, and the optimizer that steps their tables."""
