"""Models that only predict: bundles of a program and of tables that no longer change."""

from recstore_ops.serving.bundle import Bundle
from recstore_ops.serving.exporting import export
from recstore_ops.serving.following.followed import FollowingBundle
from recstore_ops.serving.following.publisher import Publisher
from recstore_ops.serving.following.publishing import publish
from recstore_ops.serving.following.sources import PublisherAddress
from recstore_ops.serving.freezing import freeze
from recstore_ops.serving.frozen_table import EncodingName, FrozenMemory, FrozenTable
from recstore_ops.serving.loading import load_bundle

__all__ = [
    "Bundle",
    "EncodingName",
    "FollowingBundle",
    "FrozenMemory",
    "FrozenTable",
    "Publisher",
    "PublisherAddress",
    "export",
    "freeze",
    "load_bundle",
    "publish",
]
