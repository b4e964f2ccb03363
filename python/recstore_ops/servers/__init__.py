"""The store in which tables are opened: in this process, which is the default, or on parameter servers.

A choice holds for the tables opened from then on. Tables that are already open stay in their store. If the program
makes no choice, the configuration file decides: `distributed_client.servers` names servers; see
`recstore_ops.servers.server_config`.
"""

from recstore_ops.servers.choosing import (
    DEFAULT_PORT,
    EMBEDDED,
    SERVERS,
    ServerChoice,
    current_ps_backend,
    embedded_for,
    move_servers,
    prepare,
    set_ps_backend,
    set_ps_config,
    set_ps_servers,
    use_constructor_address,
    use_servers,
)
from recstore_ops.servers.first_call import choose_at_first_call
from recstore_ops.servers.job_size import watch_job

__all__ = [
    "DEFAULT_PORT",
    "EMBEDDED",
    "SERVERS",
    "ServerChoice",
    "current_ps_backend",
    "embedded_for",
    "move_servers",
    "prepare",
    "set_ps_backend",
    "set_ps_config",
    "set_ps_servers",
    "use_constructor_address",
    "use_servers",
]

choose_at_first_call()
watch_job()
