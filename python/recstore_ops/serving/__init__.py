"""Models that only predict: bundles of a program and of tables that no longer change."""

from recstore_ops.serving.bundle import Bundle, export, load_bundle
from recstore_ops.serving.frozen_table import EncodingName, FrozenMemory, FrozenTable, freeze

__all__ = ["Bundle", "EncodingName", "FrozenMemory", "FrozenTable", "export", "freeze", "load_bundle"]
