"""What each rank tells each other: a few numbers and some bytes, in one exchange where they fit.

How many bytes there are nobody knows before. So a message has room for about as many as the largest one before it
had; where the room of any rank is too small, what does not fit goes in a second exchange. Every message has the size
of its sender's largest one, so that all ranks know alike whether there is a second exchange, and how much room is next.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from recstore_ops.sharding.statistics import count
from recstore_ops.table.shard import Shard

_WORD_BYTES = 8
_SIZES = 2
"""The words that a message begins with: its bytes, and those of its sender's largest one."""

_KEPT, _OUT_OF = 15, 16
"""The part of its room that is left to a message of which others were smaller."""

_rooms: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, int]] = WeakKeyDictionary()
"""How many bytes a message has room for, by group and kind; the same on all ranks."""


class Messages(NamedTuple):
    """What came from each rank.

    Attributes:
        words: the numbers, by rank.
        bodies: the bytes, by rank: uint8.
    """

    words: list[list[int]]
    bodies: list[Tensor]


def exchange_messages(
    shard: Shard, kind: Hashable, words: Sequence[Sequence[int]], bodies: Sequence[Tensor], counted_as: str
) -> Messages:
    """Sends each rank a message. All ranks call it together, with as many words each.

    Args:
        shard: whose ranks.
        kind: of the messages: those of one kind are of about the same size.
        words: for each rank.
        bodies: for each rank, uint8; of a multiple of eight bytes.
        counted_as: what the bytes of bodies are counted as.
    """
    rooms = _rooms.setdefault(shard.group, {})
    room = rooms.get(kind, 0)
    sizes = [body.numel() for body in bodies]
    of_each = [[size, max(sizes), *own] for size, own in zip(sizes, words, strict=True)]
    heads = torch.tensor(of_each, dtype=torch.int64, device="cpu")
    sent = torch.zeros((shard.world, heads.shape[1] * _WORD_BYTES + room), dtype=torch.uint8, device="cpu")
    start = heads.shape[1] * _WORD_BYTES
    sent[:, :start] = heads.view(torch.uint8)
    for message, body in zip(sent, bodies, strict=True):
        message[start : start + min(room, body.numel())] = body[:room]
    bytes_W = [sent.shape[1]] * shard.world
    received = shard.all_to_all(sent.flatten(), bytes_W, bytes_W).view(sent.shape)
    heads_W = received[:, :start].contiguous().view(torch.int64).tolist()
    most = max(head[1] for head in heads_W)
    came = [head[0] for head in heads_W]
    parts = [message[start : start + min(room, size)] for message, size in zip(received, came, strict=True)]
    if most > room:
        rest = _exchanged_rest(shard, [body[room:] for body in bodies], [max(0, size - room) for size in came])
        parts = [torch.cat(pair) for pair in zip(parts, rest, strict=True)]
    rooms[kind] = max(_with_room(most), room * _KEPT // _OUT_OF // _WORD_BYTES * _WORD_BYTES)
    foreign = sum(sizes) - sizes[shard.rank]
    filled = sum(min(room, size) for rank, size in enumerate(sizes) if rank != shard.rank)
    count(count_bytes=sent.shape[1] * (shard.world - 1) - filled, **{counted_as: foreign})
    return Messages([head[_SIZES:] for head in heads_W], parts)


def _exchanged_rest(shard: Shard, rest: list[Tensor], came: list[int]) -> tuple[Tensor, ...]:
    return shard.all_to_all(torch.cat(rest), [part.numel() for part in rest], came).split(came)


def _with_room(size: int) -> int:
    """An eighth more than a size, in whole words."""
    return -(-size * 9 // 8 // _WORD_BYTES) * _WORD_BYTES
