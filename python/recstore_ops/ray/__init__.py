"""Parameter servers on a Ray cluster: shards as actors that Ray starts again elsewhere, and clients that find them.

Rows and gradients go over the servers' own ports; Ray places the servers, watches them, and reports their addresses.

    import recstore_ops.ray as on_ray
    servers = on_ray.start_servers(4, data="/shared/tables")   # a directory that every node sees
    servers.use()                                              # in this process; tasks call on_ray.connect()
"""

from recstore_ops.ray import needs_extra  # noqa: F401  isort: skip

from recstore_ops.ray.starting import DURABILITIES, PLACEMENTS, Servers, connect, disconnect, start_servers

__all__ = ["DURABILITIES", "PLACEMENTS", "Servers", "connect", "disconnect", "start_servers"]
