"""Configurations of every form, and tokens: an error says why."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from strange_json import STRANGE, changed, paths

from recstore_ops import set_ps_servers
from recstore_ops.config.tokens import MAX_TOKEN_BYTES, check_token
from recstore_ops.ops import operators
from recstore_ops.servers.server_config import read_token
from recstore_ops.serving import PublisherAddress
from recstore_ops.serving.access import Access

pytestmark = pytest.mark.tier("test")

CONFIG = {
    "num_embeddings": 9,
    "dtype": "float32",
    "seed": 1,
    "block_size": 64,
    "initializer": {"kind": "normal", "mean": 0.0, "std": 0.1},
    "optimizer": {"kind": "adam", "lr": 0.1, "betas": [0.9, 0.99]},
    "state_dtype": "float32",
    "admission": {"kind": "count", "threshold": 2},
    "eviction": {"ttl": 3, "keep": [1]},
}


def test_every_form_of_a_configuration_is_a_table_or_an_error() -> None:
    for number, path in enumerate(paths(CONFIG)):
        for place, strange in enumerate(STRANGE):
            name = f"json_forms/{number}/{place}"
            # Any other exception, or a process that ends, fails the test.
            with contextlib.suppress(RuntimeError, ValueError):
                operators.make_hashtable(name, 4, changed(CONFIG, path, strange))
                torch.ops.recstore.drop_table(name)
    assert operators.make_hashtable("json_forms/right", 4, json.dumps(CONFIG)) is not None


@pytest.mark.parametrize(
    ("dim", "config", "expected"),
    [
        (
            1024,
            '{"admission": {"kind": "count", "threshold": 2, "shared_rows": 1073741824}}',
            "admission.shared_rows 1073741824 of dim 1024",
        ),
        (4, '{"memory_limit": 1, "disk": "s3://bucket/x"}', "disk must be the path of a local directory"),
        (4, '{"optimizer": {"kind": "sgd", "lr": [' + "0," * 9_000 + "0]}}", "optimizer must have at most 4096 bytes"),
        (4, '{"eviction": {"ttl": 1, "keep": [' + "1," * (1 << 20) + "1]}}", "eviction.keep must have at most 1048576"),
        (4, '[null, "float32"]', "a configuration must be a JSON object, got a list"),
    ],
)
def test_a_configuration_that_costs_too_much_is_refused(dim: int, config: str, expected: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=expected):
        operators.make_hashtable("json_forms/costly", dim, config)


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("", "the token is empty"),
        ("x" * (MAX_TOKEN_BYTES + 1), "at most 4096 bytes, got 4097"),
        ("ü" * 2_049, "at most 4096 bytes, got 4098"),
        ("two\nlines", "one line of text"),
        ("a\0", "one line of text"),
        ("\ud800", "one line of text"),
        (float("nan"), "must be a string, got float"),
    ],
)
def test_a_token_has_one_form(token: Any, expected: str, tmp_path: Path) -> None:
    for take in (
        check_token,
        Access,
        lambda token: PublisherAddress("127.0.0.1:1", token),
        lambda token: set_ps_servers(["127.0.0.1:1"], token=token),
    ):
        with pytest.raises(ValueError, match=expected):
            take(token)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"x" * 5_000, "a token must have at most 4096 bytes"),
        (b"x" * 100_000, "a token must have at most 4096 bytes"),
        (b"\xff\xfe", "a token must be text in UTF-8"),
        (b"a\nb", "one line of text"),
        (b" \n", "the token is empty"),
    ],
)
def test_a_file_without_a_token_names_itself(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected) as refused:
        read_token(path)
    assert str(path) in str(refused.value)
    path.write_bytes(b"  " + b"x" * MAX_TOKEN_BYTES + b"\n")
    assert read_token(path) == "x" * MAX_TOKEN_BYTES
