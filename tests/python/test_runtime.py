"""Bundles without Python: the examples in Rust and in C++ give the bits of the process that trains."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_programs import ONLY_TORCH, Runtime
from test_bundles import IDS, MADE_OF, OFFSETS, Clicks, Made, expected
from torch import Tensor
from warm_programs import output_of

from recstore_ops import DistEmbeddingBag, KeyedJaggedTensor, RecStoreEmbeddingBagCollection, load_bundle
from recstore_ops.ops import operators
from recstore_ops.serving import export
from recstore_ops.serving.checked_json import checked_json
from recstore_ops.serving.frozen_table import EncodingName
from recstore_ops.serving.manifest import GRAPH, NAME, PROGRAM, STATE, sum_of

pytestmark = [pytest.mark.tier("all"), ONLY_TORCH]

TableName = Callable[[], str]
LANGUAGES = ("Rust", "C++")


@pytest.fixture
def bundle(table_name: TableName, tmp_path: Path) -> Path:
    """The bundle of a perceptron over two tables."""
    model = Clicks(table_name(), table_name())
    for module in (model.user, model.item):
        operators.emb_write(module.table.handle, torch.arange(6), torch.randn(6, 4))
    return export(model, (IDS,), tmp_path / "bundle")


def refused(runtime: Runtime, bundle: Path, inputs: list[Tensor], folder: Path) -> str:
    """What both programs say, which is the same."""
    answers = [runtime.ask(language, bundle, inputs, folder) for language in LANGUAGES]
    assert {answer.code for answer in answers} == {1}
    (told,) = {answer.told for answer in answers}
    return told.removeprefix("predict: ").strip()


def assert_gives(runtime: Runtime, bundle: Path, inputs: list[Tensor], wanted: Tensor, folder: Path) -> None:
    for language in LANGUAGES:
        answer = runtime.ask(language, bundle, inputs, folder)
        assert answer.code == 0, answer.told
        assert torch.equal(answer.tensors[0], wanted.flatten()), language


def test_sizes_that_the_program_excludes_are_refused_as_by_python(runtime: Runtime, tmp_path: Path) -> None:
    class Last(torch.nn.Module):
        """Takes the last rows of many, and doubles an odd number of them."""

        def forward(self, x: Tensor) -> Tensor:
            """Returns sums."""
            last = x[-8:] if x.shape[0] > 8 else x
            return last.sum(1) * (2 if x.shape[0] % 2 else 1)

    bundle = export(Last(), (torch.ones(4, 6),), tmp_path / "model")
    assert_gives(runtime, bundle, [torch.ones(2, 6)], torch.full((2,), 6.0), tmp_path)
    for rows in (12, 7):
        with pytest.raises(ValueError, match="for which the program was exported") as caught:
            load_bundle(bundle)(torch.ones(rows, 6))
        told = refused(runtime, bundle, [torch.ones(rows, 6)], tmp_path)
        assert told.partition(": ")[2] == str(caught.value).partition(": ")[2]


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_a_bag_gives_the_bits_of_python(
    runtime: Runtime, table_name: TableName, tmp_path: Path, encoding: EncodingName
) -> None:
    bag, ids = DistEmbeddingBag(None, 4, table_name()), IDS.flatten()
    operators.emb_write(bag.table.handle, torch.arange(6), torch.randn(6, 4))
    path = export(bag, (ids, OFFSETS), tmp_path / "bundle", encoding=encoding)
    wanted = expected(bag, ids, OFFSETS) if encoding == "float32" else load_bundle(path)(ids, OFFSETS)
    assert_gives(runtime, path, [ids, OFFSETS], wanted, tmp_path)


def test_features_give_the_bits_of_python(runtime: Runtime, table_name: TableName, tmp_path: Path) -> None:
    names = [table_name(), table_name()]
    tables = [
        {"name": name, "num_embeddings": None, "embedding_dim": dim, "feature_names": [name]}
        for name, dim in zip(names, (4, 4), strict=True)
    ]
    bags = RecStoreEmbeddingBagCollection(tables)
    for module in bags.embedding_bags.values():
        operators.emb_write(module.table.handle, torch.arange(6), torch.randn(6, 4))
    lengths = torch.tensor([[2, 1, 0], [0, 1, 1]])
    features = KeyedJaggedTensor(names, torch.arange(5), lengths=lengths.flatten())
    path = export(bags, (features,), tmp_path / "bundle")
    wanted = expected(bags, features)
    assert_gives(runtime, path, [features.values(), lengths.T], wanted, tmp_path)


def test_feature_hashing_give_the_bits_of_python(runtime: Runtime, table_name: TableName, tmp_path: Path) -> None:
    model = Made(table_name())
    path = export(model, MADE_OF, tmp_path / "bundle")
    assert_gives(runtime, path, list(MADE_OF), expected(model, *MADE_OF), tmp_path)


def test_the_program_says_what_a_bundle_takes_and_gives(runtime: Runtime, bundle: Path) -> None:
    ended = runtime.run("Rust", bundle)
    assert (ended.returncode, ended.stdout) == (0, "takes ids int64 [-1, 2]\ngives output float32 [-1]\n")


def test_inputs_that_do_not_fit_are_refused(runtime: Runtime, table_name: TableName, tmp_path: Path) -> None:
    bag = DistEmbeddingBag(None, 4, table_name())
    path = export(bag, (IDS.flatten(), OFFSETS), tmp_path / "bundle")
    told = refused(runtime, path, [IDS.flatten(), torch.tensor([0, 9])], tmp_path)
    assert told.startswith("recstore::emb_bag: emb_bag: ")
    assert "\n" not in told, "no lines of libtorch"
    one_byte = torch.zeros(9, dtype=torch.uint8)
    told = refused(runtime, path, [one_byte, OFFSETS], tmp_path)
    assert told == "9 bytes are no int64 tensor of shape [1]"


def changed(path: Path, **fields: object) -> None:
    """Writes other fields into a manifest, with a checksum that is right."""
    manifest = json.loads(path.read_text())
    manifest.pop("crc32")
    kept = {name: value for name, value in (manifest | fields).items() if name not in ("format", "version")}
    version = fields.get("version", manifest["version"])
    assert isinstance(version, int)
    path.write_text(checked_json(kept, str(fields.get("format", manifest["format"])), version))


def rewritten(bundle: Path, name: str, text: str) -> None:
    """Writes another file of a program, with the sum in the manifest that is its own."""
    (bundle / name).write_text(text)
    files = json.loads((bundle / NAME).read_text())["files"]
    changed(bundle / NAME, files=files | {name: sum_of(bundle / name)})


def flipped(path: Path, place: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.write_bytes(data)


def first_row(path: Path) -> int:
    """Where the rows of a frozen table begin."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return 8 + length + json.loads(data[8 : 8 + length])["rows"]["data_offsets"][0]


def linked(path: Path) -> None:
    """Puts a link in place of a file, to the file."""
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def of_manifest(bundle: Path, field: str) -> Any:
    return json.loads((bundle / NAME).read_text())[field]


TABLE = "tables/0.safetensors"
REPLACED = {
    f"{how} as {name}": (lambda bundle, put=put, name=name: put(bundle / name), f"{name}{between}{reason}")
    for name, between in ((NAME, ": "), (GRAPH, " is damaged: "), (STATE, " is damaged: "), (TABLE, " is damaged: "))
    for how, put, reason in (
        ("a link", linked, "it is a symbolic link"),
        ("a FIFO", fifo, "it is a FIFO"),
        ("a directory", folder, "it is a directory"),
    )
}
DAMAGE = REPLACED | {
    "a linked folder": (lambda bundle: linked(bundle / "tables"), f"{TABLE} is damaged: "),
    "an unknown field": (lambda bundle: changed(bundle / NAME, code="x"), f"{NAME} is damaged: unknown field `code`"),
    "a file elsewhere": (
        lambda bundle: changed(bundle / NAME, files=of_manifest(bundle, "files") | {"../x": {"bytes": 0, "crc32": 0}}),
        f'{NAME} is damaged: "../x" is no file of a bundle',
    ),
    "a table elsewhere": (
        lambda bundle: changed(
            bundle / NAME, tables=[{**of_manifest(bundle, "tables")[0], "file": "tables/../../0.safetensors"}]
        ),
        f'{NAME} is damaged: "tables/../../0.safetensors" is no file of a table',
    ),
    "a size without a name": (
        lambda bundle: changed(bundle / NAME, inputs=[{**of_manifest(bundle, "inputs")[0], "sizes": []}]),
        f'{NAME} is damaged: "ids" has shape [-1, 2] with the names []',
    ),
    "a constant of two tables": (
        lambda bundle: changed(
            bundle / NAME,
            tables=[{**table, "constants": ["c"]} for table in of_manifest(bundle, "tables")],
        ),
        f'{NAME} is damaged: it has a constant of its tables twice, "c"',
    ),
    "no outputs": (lambda bundle: changed(bundle / NAME, outputs=[]), f"{GRAPH}: it gives 1 tensors, its manifest"),
    "a graph without an end": (lambda bundle: rewritten(bundle, GRAPH, "[" * 100_000), f"{GRAPH}: "),
    "a deep manifest": (
        lambda bundle: (bundle / NAME).write_text('{"a":' * 100_000),
        f"{NAME} is damaged: recursion limit exceeded",
    ),
    "no manifest": (lambda bundle: (bundle / NAME).unlink(), "it is no bundle: manifest.json"),
    "another directory": (lambda bundle: (bundle / NAME).write_text("{}"), f"{NAME} is damaged: its checksum"),
    "flipped manifest": (lambda bundle: flipped(bundle / NAME), f"{NAME} is damaged"),
    "another format": (lambda bundle: changed(bundle / NAME, format="recstore box"), f"{NAME}: it is of no bundle"),
    "newer": (lambda bundle: changed(bundle / NAME, version=4), "has version 4 of the format, this program reads 3"),
    "flipped graph": (lambda bundle: flipped(bundle / GRAPH), f"{GRAPH} is damaged: expected "),
    "cut state": (
        lambda bundle: (bundle / STATE).write_bytes((bundle / STATE).read_bytes()[:-1]),
        f"{STATE} is damaged",
    ),
    "no table": (lambda bundle: (bundle / TABLE).unlink(), f"{TABLE} is damaged: "),
    "cut table": (lambda bundle: (bundle / TABLE).write_bytes((bundle / TABLE).read_bytes()[:-1]), f"{TABLE}: "),
    "another's table": (
        lambda bundle: shutil.copy(bundle / "tables/1.safetensors", bundle / TABLE),
        "not of this bundle",
    ),
    "flipped rows": (lambda bundle: flipped(bundle / TABLE, first_row(bundle / TABLE)), "checksum"),
    "unknown operator": (
        lambda bundle: rewritten(bundle, GRAPH, (bundle / GRAPH).read_text().replace("aten::relu.", "aten::rule.")),
        "aten::rule.default: graphs may not call it",
    ),
    "unknown argument": (
        lambda bundle: rewritten(
            bundle, GRAPH, (bundle / GRAPH).read_text().replace('"calls":[', '"calls":[["a",1,{}],')
        ),
        f"{GRAPH}: invalid type",
    ),
    "another number of inputs": (
        lambda bundle: changed(bundle / NAME, inputs=[]),
        f"{GRAPH}: it takes 1 tensors, its manifest says 0",
    ),
    "an input of no tensor": (
        lambda bundle: changed(bundle / NAME, inputs=[{"name": "n", "type": "int"}]),
        'this runtime has no type for one of its inputs: {"name":"n","type":"int"}',
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_bundle_that_is_damaged_is_refused_with_file_and_reason(
    runtime: Runtime, bundle: Path, tmp_path: Path, name: str
) -> None:
    damage, reason = DAMAGE[name]
    (tmp_path / "ids").mkdir()
    (tmp_path / "ids" / "ids.bin").write_bytes(IDS.numpy().tobytes())
    damage(bundle)
    said = set()
    for language in LANGUAGES:
        ended = runtime.run(language, bundle, tmp_path / "ids", tmp_path)
        assert ended.returncode == 1, ended.stderr
        said.add(ended.stderr)
    (told,) = said
    assert reason in told
    assert "internal" not in told


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", ".x", "", "a/b", "..", "a b"])
def test_no_output_is_written_elsewhere(runtime: Runtime, bundle: Path, tmp_path: Path, name: str) -> None:
    (output,) = of_manifest(bundle, "outputs")
    changed(bundle / NAME, outputs=[{**output, "name": name}])
    for folder in ("in", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "in/ids.bin").write_bytes(IDS.numpy().tobytes())
    before = sorted(tmp_path.rglob("*"))
    for language in LANGUAGES:
        ended = runtime.run(language, bundle, tmp_path / "in", tmp_path / "out")
        assert ended.returncode == 1
        assert ended.stderr == f"predict: the name of a tensor is none of a file: {name}\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_size_of_no_row_is_no_division(runtime: Runtime, bundle: Path, tmp_path: Path) -> None:
    (ids,) = of_manifest(bundle, "inputs")
    for place, shape in enumerate(([-1, 0], [-1, 2**62, 4])):
        changed(bundle / NAME, inputs=[{**ids, "shape": shape, "sizes": ["B", *[None] * (len(shape) - 1)]}])
        (tmp_path / str(place)).mkdir()
        assert refused(runtime, bundle, [IDS], tmp_path / str(place)) != ""


def test_a_bundle_with_control_flow_needs_python(runtime: Runtime, bundle: Path, tmp_path: Path) -> None:
    files = json.loads((bundle / NAME).read_text())["files"]
    changed(bundle / NAME, files={PROGRAM: files[PROGRAM]})
    told = refused(runtime, bundle, [IDS], tmp_path)
    assert told == f"{bundle}: it has no graph: only torch's own program, which needs Python"


BESIDE_PYTHON = """
import ctypes, sys, recstore_ops
runtime = ctypes.CDLL(sys.argv[1])
runtime.recstore_bundle_open.restype = ctypes.c_void_p
runtime.recstore_last_error.restype = ctypes.c_char_p
print(runtime.recstore_bundle_open(sys.argv[2].encode(), b"mapped"), runtime.recstore_last_error().decode())
"""


def test_a_process_of_python_has_no_runtime_beside_it(runtime: Runtime, bundle: Path) -> None:
    library = runtime.programs["C++"].parent / "librecstore_runtime.so"
    assert output_of(BESIDE_PYTHON, library, bundle).startswith(
        "None this process has the operators of recstore-ops already"
    )


# Torch alone is loaded here: the threads are those of this process, and ctypes lets them go on side by side.
THREADS = """
import ctypes, sys, threading, torch
library = ctypes.CDLL(sys.argv[1])

class Tensor(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("dtype", ctypes.c_int), ("rank", ctypes.c_size_t),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]

for name, result in [("bundle_open", ctypes.c_void_p), ("bundle_run", ctypes.c_void_p), ("outputs_get", Tensor)]:
    getattr(library, "recstore_" + name).restype = result
bundle = ctypes.c_void_p(library.recstore_bundle_open(sys.argv[2].encode(), b"copied"))
ids, shape, answers = torch.tensor([[1, 2], [3, 4], [5, 99]]), (ctypes.c_int64 * 2)(3, 2), []

def ask():
    tensor = Tensor(None, 4, 2, shape, ids.data_ptr(), 48)
    for _ in range(200):
        outputs = ctypes.c_void_p(library.recstore_bundle_run(bundle, ctypes.byref(tensor), ctypes.c_size_t(1)))
        given = library.recstore_outputs_get(outputs, ctypes.c_size_t(0))
        answers.append(list(ctypes.cast(given.data, ctypes.POINTER(ctypes.c_float))[:3]))
        library.recstore_outputs_free(outputs)

threads = [threading.Thread(target=ask) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(answers) == 800 and all(answer == answers[0] for answer in answers)
library.recstore_bundle_close(bundle)
print(answers[0])
"""


def test_threads_ask_one_bundle_at_once(runtime: Runtime, bundle: Path) -> None:
    library = runtime.programs["C++"].parent / "librecstore_runtime.so"
    command = [sys.executable, "-c", THREADS, str(library), str(bundle)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, str(load_bundle(bundle)(IDS).tolist())), ended.stderr
