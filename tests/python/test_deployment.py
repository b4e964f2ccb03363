"""Image and manifest for Kubernetes: valid, and in step with the command line and the tree."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import tomli
import trustme
import yaml
from dockerfile_parse import DockerfileParser
from packaged_files import missing_files
from served_tables import ServerProcesses

from recstore_command.commands import imported_command
from recstore_ops import servers
from recstore_ops.config.config_file import load_config_file
from recstore_ops.servers.server_config import Tls, known_servers, served_shards

pytestmark = pytest.mark.tier("quick")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFEST = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "recstore.yaml").read_text(encoding="utf-8")))
OF_KIND: dict[str, dict[str, Any]] = {document["kind"]: document for document in MANIFEST}
POD = OF_KIND["StatefulSet"]["spec"]["template"]["spec"]
SERVER = POD["containers"][0]
CONFIG = "/etc/recstore/config/recstore_config.json"


def words(shard: int) -> list[str]:
    """What the pod of a shard runs, the shell's work done."""
    shell, flag, script = SERVER["command"]
    shown = script.replace("exec recstore", 'printf "%s\\n"')
    environment = {**os.environ, "HOSTNAME": f"recstore-{shard}"}
    done = subprocess.run([shell, flag, shown], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("document", MANIFEST, ids=[document["kind"] for document in MANIFEST])
def test_every_object_is_one_of_kubernetes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.34", strict=True)
    broken = {**document, "sepc": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.34", strict=True)


def test_every_option_is_one_of_the_command() -> None:
    command, *rest = words(3)
    assert command == "serve"
    known = {name for parameter in imported_command("serve").params for name in parameter.opts}
    used = [word for word in rest if word.startswith("--")]
    assert len(used) == len(set(used)) > 5
    assert set(used) <= known
    assert rest[rest.index("--shard") + 1] == "3"


@pytest.mark.filterwarnings("ignore:.*without effect here")
def test_the_configuration_names_the_pods(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(OF_KIND["ConfigMap"]["data"]["recstore_config.json"])
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "token").write_text("secret")
    document["distributed_client"]["token_file"] = "token"
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = load_config_file(tmp_path / "config.json")
    found, known = served_shards(config).servers, known_servers(config)
    spec, name = OF_KIND["StatefulSet"]["spec"], OF_KIND["StatefulSet"]["metadata"]["name"]
    service = OF_KIND["Service"]
    assert [server.host for server in found] == [f"{name}-{n}.{spec['serviceName']}" for n in range(spec["replicas"])]
    assert {server.port for server in found} == {port["port"] for port in service["spec"]["ports"]}
    assert spec["serviceName"] == service["metadata"]["name"]
    assert known is not None
    assert known.servers == found


def test_labels_ports_probes_and_volumes_fit_together() -> None:
    spec = OF_KIND["StatefulSet"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels == spec["selector"]["matchLabels"] == OF_KIND["Service"]["spec"]["selector"]
    assert labels == OF_KIND["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    ports = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    given = words(0)
    assert given[given.index("--health-port") + 1] == str(ports["health"])
    assert {SERVER[probe]["grpc"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {
        ports["health"]
    }
    mounts = {mount["name"]: mount["mountPath"] for mount in SERVER["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    assert set(mounts) == claims | {volume["name"] for volume in POD["volumes"]}
    paths = [word for word in given if word.startswith("/")]
    assert all(any(Path(path).is_relative_to(mount) for mount in mounts.values()) for path in paths)
    assert Path(given[given.index("--data") + 1]) == Path(mounts["data"])


@pytest.mark.tier("test")
def test_a_pods_command_serves_and_ends_in_good_order(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    for folder in ("tls", "token", "config"):
        (tmp_path / folder).mkdir()
    authority.cert_pem.write_to_path(str(tmp_path / "tls" / "ca.crt"))
    issued.private_key_pem.write_to_path(str(tmp_path / "tls" / "tls.key"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "tls" / "tls.crt"))
    (tmp_path / "token" / "token").write_text("a secret\n")
    places = {"/etc/recstore": str(tmp_path), "/data": str(tmp_path / "data"), "0.0.0.0": "127.0.0.1", "15100": "0"}
    options = words(0)[1:]
    for there, here in places.items():
        options = [option.replace(there, here) for option in options]
    dropped = {options.index("--config"), options.index("--shard")}
    kept = [option for place, option in enumerate(options) if not {place, place - 1} & dropped]
    with ServerProcesses(tmp_path, 1, *kept) as processes:
        tls = Tls(ca=tmp_path / "tls" / "ca.crt")
        try:
            servers.set_ps_servers(processes.addresses, token="a secret", tls=tls)
        finally:
            servers.set_ps_backend("embedded")
        assert "saved 0 rows" in processes.stop()[0]
        assert processes.processes[0].returncode == 0


def instructions(kind: str) -> list[str]:
    """The arguments of the image's instructions of one kind."""
    parsed = DockerfileParser(str(DEPLOY / "Dockerfile")).structure
    return [one["value"] for one in parsed if one["instruction"] == kind]


def copied() -> list[str]:
    """What the image takes from the tree."""
    return [source for line in instructions("COPY") for source in shlex.split(line)[:-1]]


def test_the_image_has_only_instructions_that_there_are_and_runs_as_the_pods_do() -> None:
    known = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "USER", "EXPOSE", "ENTRYPOINT", "CMD", "COMMENT"}
    parsed = DockerfileParser(str(DEPLOY / "Dockerfile")).structure
    assert {one["instruction"] for one in parsed} <= known
    assert parsed[[one["instruction"] == "COMMENT" for one in parsed].index(False)]["instruction"] == "FROM"
    context = POD["securityContext"]
    assert instructions("USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]
    assert set(instructions("EXPOSE")[0].split()) == {str(port["containerPort"]) for port in SERVER["ports"]}
    scripts = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert json.loads(instructions("ENTRYPOINT")[0]) == list(scripts)


def test_the_image_is_of_versions_that_the_project_takes() -> None:
    rust, python = instructions("FROM")
    needed = tomli.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    project = tomli.loads((ROOT / "pyproject.toml").read_text())
    assert _version(rust) >= _version(needed)
    assert _version(python) >= _version(project["project"]["requires-python"])
    assert project["build-system"]["requires"][0] in instructions("RUN")[1]
    torch = re.search(r"TORCH \?= (\S+)", (ROOT / "Makefile").read_text())
    assert torch
    cpus = "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    assert set(instructions("ARG")) == {f"TORCH={torch[1]}", cpus}
    installed = instructions("RUN")
    assert sum("--index-url $TORCH_INDEX torch==$TORCH" in line for line in installed) == 2
    assert any(line.endswith('[cli]"') for line in installed)
    version = tomli.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert SERVER["image"] == f"recstore:{version}"


def _version(text: str) -> tuple[int, ...]:
    found = re.search(r"(\d+)\.(\d+)", text)
    assert found
    return int(found[1]), int(found[2])


@pytest.mark.skipif(shutil.which("cargo") is None, reason="no cargo")
def test_the_image_copies_all_that_it_is_built_from(tmp_path: Path) -> None:
    for source in copied():
        place = ROOT / source
        assert place.exists(), source
        if place.is_dir():
            shutil.copytree(place, tmp_path / source, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(place, tmp_path / source)
    listed = ["cargo", "metadata", "--offline", "--locked", "--no-deps", "--format-version", "1"]
    done = subprocess.run(listed, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    here = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    names = [{package["name"] for package in json.loads(one.stdout)["packages"]} for one in (done, here)]
    assert names[0] == names[1]
    assert missing_files(tmp_path) == []


def test_the_context_of_the_image_has_what_it_copies_and_no_more() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    assert sorted(line[1:] for line in lines if line.startswith("!")) == sorted(copied())
    left_out = [line.removeprefix("**/") for line in lines[1:] if not line.startswith("!")]
    assert not any(fnmatch(Path(source).name, pattern) for source in copied() for pattern in left_out)
