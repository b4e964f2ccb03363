"""Memory for requests under way, which is bounded however many clients send."""

from __future__ import annotations

from recstore_ops.serving.door.refusals import Kind, Refusal


class Room:
    """A number of bytes that requests share.

    Args:
        size: of all together.
    """

    def __init__(self, size: int) -> None:
        self._free = size

    @property
    def free(self) -> int:
        """Bytes that are not taken."""
        return self._free

    def take(self, size: int) -> Taken:
        """Takes bytes until the block ends.

        Raises:
            Refusal: there are not as many.
        """
        if size > self._free:
            raise Refusal(Kind.BUSY, "the requests under way take all memory for requests: try again later")
        self._free -= size
        return Taken(self, size)

    def give(self, size: int) -> None:
        """Gives bytes back."""
        self._free += size


class Taken:
    """Bytes that a request has."""

    def __init__(self, room: Room, size: int) -> None:
        self._room = room
        self._size = size

    def shrink(self, size: int) -> None:
        """Gives back all but so many."""
        self._room.give(self._size - size)
        self._size = size

    def __enter__(self) -> Taken:
        return self

    def __exit__(self, *_: object) -> None:
        self.shrink(0)
