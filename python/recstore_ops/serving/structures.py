"""How tensors lie in containers, as text: that of `torch.utils._pytree.treespec_dumps`, and of named tuples by fields.

It reads tuples, lists, dictionaries, named tuples, and batches of sparse features of this package. Classes of other
names are unknown: a named tuple is made anew of its fields.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from recstore_ops.serving.closed_json import fields_of, parse_json, shown, texts, typed, whole
from recstore_ops.sparse.jagged_tensor import JaggedTensor
from recstore_ops.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recstore_ops.sparse.keyed_tensor import KeyedTensor

_PROTOCOL = 1
_DEEPEST = 64
_MAX = 1 << 20
"""Leaves of a structure."""
_NAMED_TUPLE = "collections.namedtuple"
_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NAMES: dict[Any, str] = {
    tuple: "builtins.tuple",
    list: "builtins.list",
    dict: "builtins.dict",
    OrderedDict: "collections.OrderedDict",
    torch.Size: "builtins.tuple",
    namedtuple: _NAMED_TUPLE,
    KeyedJaggedTensor: "recstore_ops.KeyedJaggedTensor",
    JaggedTensor: "recstore_ops.JaggedTensor",
    KeyedTensor: "recstore_ops.KeyedTensor",
}


class NoStructureError(ValueError):
    """Containers of a class that has no words."""


def written_structure(structure: TreeSpec) -> str:
    """Returns a structure as text.

    Raises:
        NoStructureError: a container or a key has no words.
    """
    return json.dumps([_PROTOCOL, _written(structure)])


def read_structure(text: Any, what: str) -> TreeSpec:
    """Returns the structure of a text.

    Args:
        text: as `written_structure` returns it.
        what: it is, for messages.

    Raises:
        ValueError: it is none.
    """
    pair = typed(parse_json(typed(text, str, what)), list, what)
    if len(pair) != 2 or type(pair[0]) is not int or pair[0] != _PROTOCOL:
        raise ValueError(f"{what}: expected a structure of version {_PROTOCOL}, got {shown(text)}")
    structure = _read(pair[1], what, _DEEPEST)
    if structure.num_leaves > _MAX:
        raise ValueError(f"{what} has more than {_MAX} leaves")
    return structure


def are_alike(left: TreeSpec, right: TreeSpec) -> bool:
    """Whether structures are equal, named tuples being equal to others of the same fields."""
    if left == right:
        return True
    if left.type is not namedtuple or right.type is not namedtuple:
        contexts = left.context == right.context
    else:
        contexts = left.context._fields == right.context._fields
    if left.type is not right.type or not contexts or left.num_children != right.num_children:
        return False
    return all(map(are_alike, _children(left), _children(right)))


def _children(structure: TreeSpec) -> list[TreeSpec]:
    return [structure.child(place) for place in range(structure.num_children)]


def _written(structure: TreeSpec) -> dict[str, Any]:
    if structure.is_leaf():
        return {"type": None, "context": None, "children_spec": []}
    if (name := _NAMES.get(structure.type)) is None:
        raise NoStructureError(f"a container of class {getattr(structure.type, '__name__', structure.type)}")
    context = structure.context
    if name == _NAMED_TUPLE:
        context = list(context._fields)
    _check_context(name, context, structure.num_children)
    return {"type": name, "context": json.dumps(context), "children_spec": [*map(_written, _children(structure))]}


def _check_context(name: str, context: Any, count: int) -> None:
    try:
        _CONTEXTS[name](json.loads(json.dumps(context)), count)
    except (TypeError, ValueError) as error:
        raise NoStructureError(f"a container of {name} with {shown(context)}: {error}") from None


def _read(node: Any, what: str, depth: int) -> TreeSpec:
    fields = fields_of(node, ("type", "context", "children_spec"), what)
    children = typed(fields["children_spec"], list, what)
    if fields["type"] is None:
        if fields["context"] is not None or children:
            raise ValueError(f"{what}: a leaf has neither context nor children")
        return _LEAF
    # The text may come from elsewhere, and this function calls itself for each level.
    if depth == 0:
        raise ValueError(f"{what} has containers more than {_DEEPEST} deep")
    name = typed(fields["type"], str, what)
    if name not in _CONTEXTS:
        raise ValueError(f"{what} has containers of {shown(name)}; a graph knows {', '.join(_CONTEXTS)}")
    context = parse_json(typed(fields["context"], str, f"{what}: the context of {name}"))
    try:
        kind, read = _CONTEXTS[name](context, len(children))
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    return TreeSpec(kind, read, [_read(each, what, depth - 1) for each in children])


_LEAF = tree_flatten(0)[1]


def _nothing(context: Any, count: int) -> None:
    if context is not None:
        raise ValueError(f"it has no context, got {shown(context)}")


def _keys(context: Any, count: int) -> list[Any]:
    keys = typed(context, list, "its keys")
    if not all(type(key) in (str, int, bool, type(None)) for key in keys):
        raise ValueError(f"its keys must be strings or integers, got {shown(keys)}")
    # As a dictionary has them: there True and 1 are one key.
    if len({*keys}) != count or len(keys) != count:
        raise ValueError(f"expected {count} different keys, got {shown(keys)}")
    return keys


def _fields(context: Any, count: int) -> type:
    names = texts(context, "its fields")
    if len(names) != count or not all(map(_FIELD.fullmatch, names)):
        raise ValueError(f"expected {count} names of fields, got {shown(names)}")
    return namedtuple("NamedTuple", names)  # pyright: ignore[reportUntypedNamedTuple]


def _of_features(context: Any, count: int) -> Any:
    """The keys of a batch, and strides and inverse of one that has them."""
    if isinstance(context, list):
        texts(context, "its keys")
        _check_count(count, 2, 3)
        return context
    fields = fields_of(context, ("keys", "strides", "inverse"), "a batch of features")
    texts(fields["keys"], "its keys")
    if fields["strides"] is not None:
        for row in typed(fields["strides"], list, "its strides"):
            for stride in typed(row, list, "its strides"):
                whole(stride, 0, (1 << 31) - 1, "a stride")
    if fields["inverse"] is not None:
        texts(fields["inverse"], "its inverse")
        count -= 1
    _check_count(count, 2, 3)
    return fields


def _of_feature(context: Any, count: int) -> None:
    _nothing(context, count)
    _check_count(count, 2, 3)


def _of_keyed(context: Any, count: int) -> list[Any]:
    _check_count(count, 1, 1)
    if len(typed(context, list, "a keyed tensor")) != 3:
        raise ValueError(f"expected keys, lengths and a dimension, got {shown(context)}")
    keys, lengths, dimension = texts(context[0], "its keys"), context[1], context[2]
    for length in typed(lengths, list, "its lengths"):
        whole(length, 0, (1 << 31) - 1, "a length")
    if len(keys) != len(lengths):
        raise ValueError(f"it has {len(keys)} keys and {len(lengths)} lengths")
    whole(dimension, -64, 64, "its dimension")
    return context


def _check_count(count: int, least: int, most: int) -> None:
    if not least <= count <= most:
        raise ValueError(f"expected {least} to {most} tensors, got {count}")


_CONTEXTS: dict[str, Callable[[Any, int], tuple[Any, Any]]] = {
    "builtins.tuple": lambda context, count: (tuple, _nothing(context, count)),
    "builtins.list": lambda context, count: (list, _nothing(context, count)),
    "builtins.dict": lambda context, count: (dict, _keys(context, count)),
    "collections.OrderedDict": lambda context, count: (OrderedDict, _keys(context, count)),
    _NAMED_TUPLE: lambda context, count: (namedtuple, _fields(context, count)),
    "recstore_ops.KeyedJaggedTensor": lambda context, count: (KeyedJaggedTensor, _of_features(context, count)),
    "recstore_ops.JaggedTensor": lambda context, count: (JaggedTensor, _of_feature(context, count)),
    "recstore_ops.KeyedTensor": lambda context, count: (KeyedTensor, _of_keyed(context, count)),
}
"""Class and checked context of each kind of container, by its name in the text."""
