"""Looking through files for ids: every format, compared with a search that knows what was written."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from forgotten import distinctive_ids
from safetensors.torch import save, save_file

from recstore_ops import _native
from recstore_ops.forgetting.id_set import IdSet, read_ids
from recstore_ops.forgetting.report import Occurrence
from recstore_ops.forgetting.scan import look_into, scan

pytestmark = pytest.mark.tier("quick")

IDS = [*distinctive_ids(3).tolist(), -5]
LARGE, SECOND, THIRD, NEGATIVE = IDS


def found(path: Path, ids: list[int] = IDS) -> list[tuple[str, tuple[int, ...], int, bool]]:
    held = look_into(path, frozenset({"user"}), IdSet(ids))
    assert all(each.place == path for each in held)
    return [(each.what, each.ids, each.occurrences, each.is_certain) for each in held]


TEXTS: list[tuple[str, int]] = [
    ("7", 1),
    ("-7", 0),
    ("a,7\nb,7.0\nc,7.5\n", 2),
    ('{"user": 7, "score": 0.7}', 1),
    ("17 77 7e5 x7 7x 0.7 1.7.2 7.05", 0),
    ("7:1.0 8:7", 2),
    ("a-7 [7] (7) 7; =7| 7.", 6),
    ("7" * 10_000, 0),
]


@pytest.mark.parametrize(("text", "times"), TEXTS)
def test_a_number_of_a_text_stands_alone(text: str, times: int) -> None:
    assert IdSet([7]).in_text(text.encode())[7] == times


def test_negative_ids_are_found_with_their_sign_and_as_unsigned_numbers() -> None:
    assert IdSet([-5]).in_text(f"-5 5 {2**64 - 5}".encode()) == Counter({-5: 2})


def test_bytes_are_compared_wherever_they_begin_and_across_parts() -> None:
    chance = random.Random(0)
    noise = bytearray(chance.randbytes((2 << 20) + 100))
    expected: Counter[int] = Counter()
    for number, place in enumerate([0, 13, 5_000, (1 << 20) - 4, (1 << 20) + 9, len(noise) - 8]):
        id = IDS[number % len(IDS)]
        noise[place : place + 8] = id.to_bytes(8, "little", signed=True)
        expected[id] += 1
    assert dict(_native.ids_in_bytes(io.BytesIO(noise), IDS)) == expected
    assert _native.ids_in_bytes(io.BytesIO(b"1234567"), IDS) == []


def test_many_ids_are_found_as_one_is() -> None:
    ids = distinctive_ids(70_000)
    data = b"\1" + ids[:100].numpy().tobytes()
    assert dict(_native.ids_in_bytes(io.BytesIO(data), ids.tolist())) == Counter(ids[:100].tolist())


def write_text(path: Path) -> None:
    path.write_text(f"user,score\n{LARGE},0.5\n{SECOND},0.25\n{LARGE},1\n")


def compressed_by(opened: Callable[..., object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with opened(path, "wt") as file:  # type: ignore[attr-defined]
            file.write(f"{LARGE} {SECOND} {LARGE}")

    return write


def write_zstd(path: Path) -> None:
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write(f"{LARGE} 1 {SECOND} {LARGE}".encode())


def write_parquet(path: Path) -> None:
    rows = {
        "user": pa.array([LARGE, 7, None, LARGE]),
        "unsigned": pa.array([2**64 - 5, 1, 2, 3], pa.uint64()),
        "seen": pa.array([[SECOND, 1], [], None, [SECOND]]),
        "name": pa.array([str(THIRD), "x", None, ""]).dictionary_encode(),
        "score": pa.array([0.5] * 4),
    }
    pq.write_table(pa.table(rows), path)


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.csv", str(LARGE))
        archive.writestr("rows.safetensors", save({"ids": torch.tensor([SECOND])}))
        archive.writestr("rows.bin", bytes_of(THIRD))


def bytes_of(id: int) -> bytes:
    return id.to_bytes(8, "little", signed=True)


FILES: list[tuple[Callable[[Path], object], list[tuple[str, tuple[int, ...], int, bool]]]] = [
    (write_text, [("text", tuple(sorted((LARGE, SECOND))), 3, True)]),
    (compressed_by(gzip.open), [("text", tuple(sorted((LARGE, SECOND))), 3, True)]),
    (compressed_by(bz2.open), [("text", tuple(sorted((LARGE, SECOND))), 3, True)]),
    (compressed_by(lzma.open), [("text", tuple(sorted((LARGE, SECOND))), 3, True)]),
    (write_zstd, [("text", tuple(sorted((LARGE, SECOND))), 3, True)]),
    (
        write_parquet,
        [
            ("the column user", (LARGE,), 2, True),
            ("the column unsigned", (NEGATIVE,), 1, False),
            ("the column seen", (SECOND,), 2, True),
            ("the column name", (THIRD,), 1, True),
        ],
    ),
    (write_zip, [("text", (LARGE,), 1, True), ("a tensor", (SECOND,), 1, True)]),
    (lambda path: path.write_bytes(b"RECSTORELOG\0\1\0\0\0" + bytes_of(LARGE)), [("log", (LARGE,), 1, True)]),
    (lambda path: path.write_bytes(b"RECSTORELOG\0\1\0\0\0" + bytes_of(-5)), [("log", (-5,), 1, False)]),
    (lambda path: path.write_bytes(b"recstore update 1\n" + bytes_of(LARGE)), [("update", (LARGE,), 1, True)]),
    (
        lambda path: save_file({"ids": torch.tensor([LARGE]), "usage.step": torch.tensor([SECOND])}, path),
        [("a tensor", (LARGE,), 1, True)],
    ),
    (lambda path: path.write_bytes(b""), []),
    (lambda path: path.write_bytes(b"\0" + bytes_of(LARGE)), []),
    (lambda path: np.save(path.open("wb"), np.array([[LARGE, 1]])), []),
    (lambda path: torch.save({"ids": torch.tensor([LARGE, 9])}, path), []),
]


@pytest.mark.parametrize(("write", "expected"), FILES)
def test_a_file_is_read_by_its_format(
    tmp_path: Path, write: Callable[[Path], object], expected: list[tuple[str, tuple[int, ...], int, bool]]
) -> None:
    write(tmp_path / "file")
    assert found(tmp_path / "file") == expected


HEADER = b'{"ids": {"dtype": "I64", "shape": [9], "data_offsets": [0, 72]}}'
BEGINNINGS = [b"PAR1", b"PK\3\4", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"]


@pytest.mark.parametrize("beginning", [*BEGINNINGS, len(HEADER).to_bytes(8, "little") + HEADER])
def test_a_damaged_file_may_hold_ids(tmp_path: Path, beginning: bytes) -> None:
    (tmp_path / "file").write_bytes(beginning + b"\0\xff" * 9)
    [held] = look_into(tmp_path / "file", frozenset({"user"}), IdSet([LARGE]))
    assert str(held).startswith(f"{tmp_path / 'file'} may hold the ids: it cannot be read: ")
    assert (held.ids, held.is_certain) == ((), False)


def test_a_file_that_cannot_be_read_may_hold_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("x")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    [held] = look_into(path, frozenset(), IdSet([7]))
    assert str(held) == f"{path} may hold the ids: it cannot be read: Permission denied"


def test_all_files_below_are_looked_through_but_for_those_known(tmp_path: Path) -> None:
    for name in ("a.csv", "b/c/d.csv", "b/known.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "b" / "again").symlink_to(tmp_path / "a.csv")
    known = {(tmp_path / "b" / "known.csv").resolve()}
    held = scan([tmp_path, tmp_path / "b"], known, frozenset({"user"}), IdSet([LARGE]), progress=False)
    assert [Path(each.place).relative_to(tmp_path) for each in held] == [Path("a.csv"), Path("b/c/d.csv")]


def test_a_report_says_what_is_certain() -> None:
    assert str(Occurrence("file", "text", (7,), 1, is_certain=False)) == "file may hold 7, once: text"
    assert str(Occurrence("file", "rows", (7, 8), 2_000)) == "file holds 7, 8, 2,000 times: rows"


def test_ids_of_a_text_stand_between_commas_blanks_and_line_ends() -> None:
    assert read_ids("7, -8\n9\t10,\n\n", "here") == [7, -8, 9, 10]
    for wrong in ("7,x", "1.5", "1_000", "0x7"):
        with pytest.raises(ValueError, match="here: ids are integers with commas"):
            read_ids(wrong, "here")
