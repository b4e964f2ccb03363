"""The documented path of `recstore_ops.servers.server_config`."""

from recstore_ops.servers.server_config import *  # noqa: F403
