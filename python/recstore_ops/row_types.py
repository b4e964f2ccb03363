"""The documented path of `recstore_ops.config.row_types`."""

from recstore_ops.config.row_types import *  # noqa: F403
