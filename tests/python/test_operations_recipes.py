"""The recipes of docs/operations.md: its programs, the commands within sentences, and what to do when a shard dies."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_commands import all_blocks_of, blocks_of, page_of
from warm_programs import WarmProgram, output_of, run_program
from warm_recstore import WarmRecstore, run_recstore

pytestmark = [pytest.mark.tier("all"), pytest.mark.timeout(300)]

PORTS = ("15000", "15001", "15443", "9100", "9101")

TRAINER = """
import sys, time
from pathlib import Path
import torch
from recstore_ops import DistEmbedding, RecStoreClient, SparseOptimizer
ids = torch.arange(100)
item = DistEmbedding(None, 4, "item", initializer="zeros", optimizer={"kind": "sgd", "lr": 1.0})
optimizer = SparseOptimizer(item)
def step():
    item(ids).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
def rows():
    return sorted({float(value) for value in item.weight[ids].unique()})
def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.02)
for _ in range(3):
    step()
print("trained", rows(), flush=True)
wait_for("restarted")
"""


class Operator:
    """Who follows the page, in a folder of its own.

    Attributes:
        page: the text, with free ports and a directory of backups here.
        folder: where commands run.
    """

    def __init__(self, folder: Path) -> None:
        self.page = page_of("operations.md", PORTS).replace("/backup/", f"{folder}/backup/")
        self.folder = folder
        self.servers: list[WarmRecstore] = []
        (folder / "recstore_config.json").write_text(blocks_of(self.page, "json")[0], "utf-8")

    def block(self, kind: str, words: str) -> str:
        """The one block of a kind with some words."""
        [found] = [block.text for block in all_blocks_of(self.page) if block.kind == kind and words in block.text]
        return found

    def start(self, line: str) -> None:
        """Starts a server as a line of the page does, and waits until it is ready."""
        line = re.sub(r" 2> \S+", "", line).removesuffix("&")
        program, *arguments = shlex.split(line)
        assert program == "recstore"
        server = WarmRecstore(*arguments, cwd=self.folder, splits=True)
        self.servers.append(server)
        assert server.stdout.readline().startswith("shard ")

    def end(self, how: int) -> None:
        """Ends the server that was started last."""
        server = self.servers.pop()
        server.send_signal(how)
        server.communicate(timeout=60)

    def run(self, line: str) -> str:
        """What a command of the page prints, which must end well."""
        _, *arguments = shlex.split(line)
        ended = run_recstore(*arguments, cwd=self.folder)
        assert ended.returncode == 0, (line, ended)
        return ended.stdout

    def inline(self, words: str) -> list[str]:
        """The commands within sentences that begin with some words."""
        found = re.findall(r"`(recstore [^`]+)`", self.page)
        return [command for each in found if (command := " ".join(each.split())).startswith(words)]

    def trainer(self, ending: str) -> WarmProgram:
        """A program that trains, waits for the file `restarted`, and then goes on."""
        program = WarmProgram(TRAINER + ending, cwd=self.folder)
        assert program.stdout.readline() == "trained [-3.0]\n"
        return program

    def restarted(self) -> None:
        (self.folder / "restarted").touch()


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    operator = Operator(tmp_path)
    yield operator
    for server in operator.servers:
        server.kill()
        server.communicate()


def test_a_shard_with_a_log_that_died_goes_on_and_a_backup_is_restored_elsewhere(operator: Operator) -> None:
    first, second, top = operator.block("sh", "shard0.log").splitlines()
    operator.start(first)
    operator.start(second)
    assert operator.run(top)
    trainer = operator.trainer("step()\nprint(rows())")
    backup = operator.block("py", ".save(")
    output_of(backup, cwd=operator.folder)
    operator.end(signal.SIGKILL)
    operator.start(second)
    operator.restarted()
    assert trainer.communicate(timeout=120)[0] == "[-4.0]\n"
    for _ in range(2):
        operator.end(signal.SIGTERM)
    commands = operator.inline("recstore inspect tables/shard-0-of-2")
    for words in ("recstore inspect /", "recstore checkpoint verify", "recstore checkpoint prune"):
        commands += operator.inline(words)
    assert len(commands) == 4
    assert all(operator.run(command) for command in commands)
    port = re.findall(r'"port": (\d+)', operator.page)[0]
    (operator.folder / "recstore_config.json").unlink()
    operator.start(f"recstore serve --port {port} --data elsewhere --durability wal &")
    [restore] = re.findall(r"`(RecStoreClient\(\)\.load\([^`]+\))`", operator.page)
    restored = f"""
import torch
from recstore_ops import DistEmbedding, RecStoreClient, set_ps_servers
set_ps_servers(["127.0.0.1:{port}"])
{restore}
item = DistEmbedding(None, 4, "item", initializer="zeros", optimizer={{"kind": "sgd", "lr": 1.0}})
print(item(torch.arange(100)).unique().tolist())
"""
    assert output_of(restored, cwd=operator.folder, warns="ignore") == "[-3.0]\n"


def test_a_shard_without_a_log_that_died_is_refused_until_the_backup_is_loaded(operator: Operator) -> None:
    commands = operator.block("sh", "shard0.log").splitlines()[:2]
    first, second = (line.replace(" 2>", " --durability checkpoint 2>") for line in commands)
    operator.start(first)
    operator.start(second)
    [refused] = re.findall(r"`(it was restarted since its tables were opened:\s[^`]+)`", operator.page)
    refused = " ".join(refused.split())
    [restore] = re.findall(r"`(RecStoreClient\(\)\.load\([^`]+\))`", operator.page)
    trainer = operator.trainer(f"""
try:
    step()
except RuntimeError as error:
    print({refused!r} in str(error))
item.reset_trace()
{restore}
step()
print(rows())
""")
    output_of(operator.block("py", ".save("), cwd=operator.folder)
    operator.end(signal.SIGKILL)
    operator.start(second)
    operator.restarted()
    assert trainer.communicate(timeout=120)[0] == "True\n[-4.0]\n"
    for _ in range(2):
        operator.end(signal.SIGTERM)
    [inspect] = operator.inline("recstore inspect tables")
    assert "item" in operator.run(inspect)


def test_certificates_and_tokens_of_the_page_let_a_client_in(operator: Operator) -> None:
    *lines, serve = operator.block("sh", "openssl").splitlines()
    for line in lines:
        subprocess.run(line, shell=True, check=True, cwd=operator.folder, capture_output=True)
    (operator.folder / "recstore_config.json").unlink()
    operator.start(serve)
    client = operator.block("py", "Tls(")
    assert (
        output_of(f"{client}\nfrom recstore_ops import table_names\nprint(table_names())", cwd=operator.folder)
        == "[]\n"
    )
    wrong = client.replace('open("token").read().strip()', '"another"')
    assert "token" in run_program(wrong, cwd=operator.folder).stderr


def test_a_client_that_names_both_servers_of_a_shard_follows_the_promotion(operator: Operator) -> None:
    blocks = [text for text in blocks_of(operator.page, "console")]
    [started] = [text for text in blocks if "--synchronous" in text]
    (operator.folder / "recstore_config.json").unlink()
    for line in re.findall(r"^\$ (recstore serve .*)$", started, re.MULTILINE):
        operator.start(line)
    client = WarmProgram(operator.block("py", "|") + TRAINER + "step()\nprint(rows())", cwd=operator.folder)
    assert client.stdout.readline() == "trained [-3.0]\n"
    [promote] = [line for text in blocks for line in re.findall(r"^\$ (recstore promote .*)$", text, re.MULTILINE)]
    assert "is led by" in operator.run(promote)
    operator.servers.reverse()
    operator.end(signal.SIGKILL)  # The leader before.
    operator.restarted()
    assert client.communicate(timeout=120)[0] == "[-4.0]\n"
