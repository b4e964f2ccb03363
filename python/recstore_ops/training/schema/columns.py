"""Named, typed columns with roles, and the check that other files have them.

| role | cells | what becomes of them |
|---|---|---|
| label | numbers, booleans or one of two words | 0 or 1, by the rule of the column |
| categorical | integers, booleans, strings, floating-point numbers without fractions | a field with one id a row |
| ids | lists of integers or strings, or strings cut at a separator | a field with any number of ids |
| number | numbers or booleans | a dense feature, after the column's transform; 0 where one is missing |
| vector | lists of numbers, all of one length | as many dense features |
| weight | numbers, 0 or more | the weight of the row's loss |
| time | numbers since 1970, times, or text such as 2026-11-26T17:09:59Z | the row's event time |
| ignored | any | nothing |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["label", "categorical", "ids", "number", "vector", "weight", "time", "ignored"]
Unit = Literal["s", "ms", "us", "ns"]
Transform = Literal["none", "log", "standard"]

SCALARS = ("integer", "number", "boolean", "string")

# The types that a column of a role may have.
_TYPES: dict[Role, tuple[str, ...]] = {
    "label": SCALARS,
    "categorical": SCALARS,
    "ids": ("list of integer", "list of string", "string"),
    "number": ("integer", "number", "boolean"),
    "vector": ("list of number",),
    "weight": ("integer", "number", "boolean"),
    "time": ("integer", "number", "string", "time"),
}
# Those that mean the same in a role: whole numbers with gaps are written as floating-point ones.
_ALIKE: dict[Role, tuple[tuple[str, ...], ...]] = {
    "label": (("integer", "number", "boolean"),),
    "categorical": (("integer", "number", "boolean"),),
    "number": (("integer", "number", "boolean"),),
    "weight": (("integer", "number", "boolean"),),
    "time": (("integer", "number"),),
}


@dataclass(frozen=True)
class ColumnSchema:
    """A column.

    Attributes:
        name: in the file.
        role: what it is for.
        type: of its cells: "integer", "number", "boolean", "string", "time", or "list of " one of these; others by
            Arrow's name.
        transform: of numbers: "none", "log" for sign(x) * ln(1 + |x|), "standard" for (x - mean) / deviation.
        mean, deviation: of "standard".
        separator: between the ids of a string.
        size: of a vector.
        negative, positive: the two values of a label; None where `threshold` counts.
        threshold: the least number that is a positive label.
        unit: of numbers that are times since 1970.
        reason: why it has its role, for people.
    """

    name: str
    role: Role
    type: str
    transform: Transform | None = None
    mean: float | None = None
    deviation: float | None = None
    separator: str | None = None
    size: int | None = None
    negative: str | None = None
    positive: str | None = None
    threshold: float | None = None
    unit: Unit | None = None
    reason: str = ""

    def check_role(self, where: str) -> None:
        """Checks that the type suits the role.

        Raises:
            ValueError: it does not.
        """
        if self.role != "ignored" and self.type not in _TYPES[self.role]:
            suitable = " or ".join(_TYPES[self.role])
            raise ValueError(
                f"{where}: column {self.name!r} is {self.type}, and a column of the role {self.role} is {suitable}"
            )

    def takes(self, cell_type: str) -> bool:
        """Whether cells of another type mean what those of this column do."""
        alike = next((types for types in _ALIKE.get(self.role, ()) if self.type in types), (self.type,))
        return cell_type in alike

    @property
    def rule(self) -> str:
        """What makes a label positive, or what becomes of numbers."""
        if self.role == "label":
            return f"{self.negative} / {self.positive}" if self.threshold is None else f">= {self.threshold:g}"
        if self.role == "time":
            return "UTC" if self.unit is None else f"{self.unit} since 1970"
        if self.transform == "log":
            return "ln(1 + |x|)"
        if self.transform == "standard":
            return f"(x - {self.mean:.4g}) / {self.deviation:.4g}"
        return "" if self.separator is None else f"cut at {self.separator!r}"


@dataclass(frozen=True)
class Schema:
    """The columns of a file, in its order.

    Attributes:
        columns: of every role; one at most is the label, one the weight, and one the time.
        source: the file that they were found in, or that says them.
    """

    columns: tuple[ColumnSchema, ...]
    source: str

    def of_role(self, *roles: Role) -> tuple[ColumnSchema, ...]:
        """Returns the columns of some roles, in order."""
        return tuple(column for column in self.columns if column.role in roles)

    @property
    def label(self) -> ColumnSchema | None:
        return next(iter(self.of_role("label")), None)

    @property
    def weight(self) -> ColumnSchema | None:
        return next(iter(self.of_role("weight")), None)

    @property
    def time(self) -> ColumnSchema | None:
        return next(iter(self.of_role("time")), None)

    @property
    def read(self) -> tuple[ColumnSchema, ...]:
        """The columns that are read."""
        return tuple(column for column in self.columns if column.role != "ignored")

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.of_role("categorical", "ids"))

    @property
    def dense_names(self) -> tuple[str, ...]:
        return tuple(name for column in self.of_role("number", "vector") for name in _dense_names(column))

    def without_label(self) -> Schema:
        """Returns the schema of the same rows without labels."""
        return replace(self, columns=tuple(column for column in self.columns if column.role != "label"))

    def check(self) -> None:
        """Checks the schema by itself.

        Raises:
            ValueError: a name comes twice, a type does not suit its role, there are two labels, weights or times, or no
                field.
        """
        names = [column.name for column in self.columns]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{self.source}: expected each column once, got several of the name {min(repeated)!r}")
        for column in self.columns:
            column.check_role(self.source)
        for role in ("label", "weight", "time"):
            if len(several := self.of_role(role)) > 1:
                raise ValueError(f"{self.source}: columns {several[0].name!r} and {several[1].name!r} are both {role}")
        if not self.field_names:
            raise ValueError(
                f"{self.source}: expected at least one column of ids, categorical or ids, got only {listed(names)}"
            )

    def check_names(self, names: tuple[str, ...], where: object) -> None:
        """Checks that a file has these columns, and no others.

        Raises:
            ValueError: a column that is read is not there, or is there twice; or one is that the schema does not know.
        """
        for column in self.read:
            if (count := names.count(column.name)) != 1:
                found = "there is no column" if count == 0 else f"there are {count} columns"
                raise ValueError(f"{where}: {found} {column.name!r}, which is {column.type} in {self.source}")
        known = {column.name for column in self.columns}
        if more := [name for name in names if name not in known]:
            raise ValueError(f"{where}: there is a column {more[0]!r}, which {self.source} lacks")

    def check_types(self, types: Mapping[str, str], where: object) -> None:
        """Checks that the columns of a file mean what they do here.

        Raises:
            ValueError: one has another type.
        """
        for column in self.read:
            if not column.takes(types[column.name]):
                raise ValueError(
                    f"{where}: column {column.name!r} is {types[column.name]}, and {column.type} in {self.source}"
                )


def listed(names: list[str] | tuple[str, ...]) -> str:
    """Returns names for a message."""
    return ", ".join(map(repr, names)) or "none"


def _dense_names(column: ColumnSchema) -> tuple[str, ...]:
    if column.role == "number":
        return (column.name,)
    return tuple(f"{column.name}[{place}]" for place in range(column.size or 0))
