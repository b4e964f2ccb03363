"""The documented path of `recstore_ops.config.config_file`."""

from recstore_ops.config.config_file import *  # noqa: F403
