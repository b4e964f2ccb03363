"""The documented path of `recstore_ops.servers.workers`."""

from recstore_ops.servers.workers import *  # noqa: F403
