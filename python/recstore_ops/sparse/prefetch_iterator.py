"""Batches given out a few later than they are read, so that work on them can be begun ahead."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar


def find_features(batch: Any) -> Any:
    """Finds the `KeyedJaggedTensor` of a batch.

    Raises:
        ValueError: there is none, or more than one; give `features` to say which.
    """
    if hasattr(batch, "length_per_key"):
        return batch
    if hasattr(batch, "sparse_features"):
        return batch.sparse_features
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    found = [value for value in values if hasattr(value, "length_per_key")]
    if len(found) != 1:
        raise ValueError(
            f"expected one KeyedJaggedTensor in a batch of type {type(batch).__name__}, found {len(found)}; "
            "say with features= which it is"
        )
    return found[0]


_Batch = TypeVar("_Batch")
_Begun = TypeVar("_Begun")


def check_prefetch_count(prefetch_count: Any) -> None:
    """Checks how many batches are looked ahead.

    Raises:
        TypeError, ValueError: no int, or one below 1.
    """
    if not isinstance(prefetch_count, int):
        raise TypeError(f"prefetch_count must be an int, got {prefetch_count!r}")
    if prefetch_count < 1:
        raise ValueError(f"prefetch_count must be at least 1, got {prefetch_count}")


def prefetch(
    batches: Iterable[_Batch], begin: Callable[[_Batch], _Begun], depth: int
) -> Iterator[tuple[_Batch, _Begun]]:
    """Gives each batch with what `begin` returned for it, which was called `depth` batches before.

    An error of `batches` or `begin` is raised in place of its batch: after the batches before it.
    """
    ahead: deque[tuple[_Batch, _Begun]] = deque()
    read = ((batch, begin(batch)) for batch in batches)
    while True:
        try:
            ahead.append(next(read))
        except StopIteration:
            break
        except Exception:
            while ahead:
                yield ahead.popleft()
            raise
        if len(ahead) > depth:
            yield ahead.popleft()
    while ahead:
        yield ahead.popleft()
