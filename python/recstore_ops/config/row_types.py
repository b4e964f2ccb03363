"""The types in which a table keeps its rows: float32, bfloat16, float16, int8 and float8_e4m3fn.

Arithmetic is always in float32, and so are the values that a read returns and, without `state_dtype`, the optimizer's
slots. A narrower row is widened, changed and rounded back:

- written rows and initial values to the nearest, ties to even. Values beyond float16's 65,504 become 65,504;
- in an optimizer's step *stochastically*: up or down, with the probability that makes the expected value exact.
  Rounding to the nearest would take a small step away again and again, and the row would never move.

The random bits are a function of the table's seed and name, the id, the column and the step. Two runs give the same
bits, whatever the threads, the vector width or the order of insertion; another seed gives others.

A row of 8 bits also has a scale: the least power of two with which its greatest weight has a code. A weight is
`code * scale`. Codes are whole numbers from -127 to 127, or numbers of e4m3 up to 448. Every such weight is a bfloat16
as well, so exact values of these rows are given as bfloat16.

Sources: Gupta et al. 2015, "Deep learning with limited numerical precision", section 3; "OCP Microscaling Formats (MX)
Specification", version 1.0 (2023), there with a scale for 32 elements.
"""

from typing import Literal

import torch

RowTypeName = Literal["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]

ROW_TYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}

VALUE_TYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.bfloat16,
    "float8_e4m3fn": torch.bfloat16,
}
"""For each row type the one in which the values of rows are exact."""


def type_name(dtype: torch.dtype) -> str:
    """The name of a type in a table's configuration: `torch.bfloat16` is `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def state_type(dtype: torch.dtype | str) -> str | None:
    """The name of the type of an optimizer's state in a table's configuration, which names no `float32`."""
    name = dtype if isinstance(dtype, str) else type_name(dtype)
    return None if name == "float32" else name


def check_output_dtype(output_dtype: torch.dtype | None, row_type: str, table: str) -> torch.dtype:
    """Returns the type in which a module gives rows: float32 by default.

    Args:
        output_dtype: float32 or the type of the rows, which is bfloat16 for rows of 8 bits.
        row_type: the name of the type of the rows.
        table: named in the message.

    Raises:
        ValueError: another type.
    """
    if output_dtype is None:
        return torch.float32
    values = VALUE_TYPES[row_type]
    if output_dtype not in (torch.float32, values):
        raise ValueError(
            f'output_dtype of table "{table}" must be torch.float32 or the type of its rows, {values}, '
            f"got {output_dtype}"
        )
    return output_dtype


__all__ = ["ROW_TYPES", "VALUE_TYPES", "RowTypeName", "check_output_dtype", "type_name"]
