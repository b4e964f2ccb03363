"""How batches print: as TorchRec's do."""

from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor


def bags_text(values: Tensor, bounds: list[int]) -> str:
    """Bags that start and end at these bounds."""
    return str([values[start:end].tolist() for start, end in pairwise(bounds)])


def jagged_text(values: Tensor, weights: Tensor | None, bounds: list[int], indent: str) -> str:
    """The bags of a feature, or their values and weights, each on a line of its own."""
    if weights is None:
        return bags_text(values, bounds)
    parts = {"values": bags_text(values, bounds), "weights": bags_text(weights, bounds)}
    return ",\n".join(f'{indent}"{name}": {text}' for name, text in parts.items())


def block(kind: str, lines: Iterable[str]) -> str:
    """What a batch of a kind prints."""
    return f"{kind}({{\n" + ",\n".join(lines) + "\n})\n"


def keyed_block(kind: str, parts: Iterable[tuple[str, str]]) -> str:
    """The same of parts with names, which may come twice."""
    lines = [f'    "{key}": {text}' for key, text in parts]
    return block(kind, lines) if lines else f"{kind}()\n"
