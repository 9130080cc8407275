"""The JSON Schemas that editors use: current, and of one mind with the loader."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from dflash_ops.config import ConfigError, bundled, load_host, load_playbook
from dflash_ops.config.document import read_document
from dflash_ops.config.schema import FOLDER, texts

EXAMPLES = sorted([*bundled("hosts").glob("*.yaml"), *bundled("playbooks").glob("*.yaml")])
GOOD = {
    "host": [
        "transport: local",
        "name: x\ntransport: ssh\nssh: {address: a}",
        "transport: local\nenvironment: {NCCL_DEBUG: INFO, _x: ''}\nsecrets: {A: 'env:B', C: 'file:~/c d'}",
        "hosts: {a: {transport: local}, b: {transport: pct, ssh: {address: n}, pct: {id: 100}}}",
    ],
    "playbook": [
        "version: 1\nworkload: {target: t, mask_token: 7, gpus: [0, GPU-ab]}\ntraining: {steps: 1, betas: [0, 0.5]}",
        "version: 1\nworkload: {target: 'asset:a', mask_token: 7}\ntraining: {steps: 1}\n"
        "assets: {a: {path: /srv/x}, b: {upload: data, sha256: '" + "0" * 64 + "'}}",
    ],
}
BAD = {
    "host": [
        "transport: ssh",
        "transport: local\nssh: {address: a}",
        "transport: ssh\nssh: {address: -x}",
        "transport: ssh\nssh: {address: a}\npct: {id: 100}",
        "transport: pct\nssh: {address: a}",
        "transport: pct\nssh: {address: a}\npct: {id: 1}",
        "transport: local\nworkdir: here",
        "transport: local\nport: 1",
        "transport: local\nenvironment: {PATH: /bin}",
        "transport: local\nenvironment: {DFLASH_OPS_RUN: x}",
        "transport: local\nenvironment: {1A: x}",
        "transport: local\nenvironment: {A: 1}",
        "transport: local\nsecrets: {A: hf_abcdefgh}",
        "transport: local\nsecrets: {HOME: 'env:A'}",
        "hosts: {}",
        "hosts: {a: {}}",
        "hosts: {a: {transport: local}}\nb: 1",
    ],
    "playbook": [
        "version: 1\nworkload: {target: t, mask_token: 7}\ntraining: {}",
        "version: 1\nworkload: {target: t, mask_token: 7, buckets: []}\ntraining: {steps: 1}",
        "version: 1\nworkload: {target: t, mask_token: 7, gpus: some}\ntraining: {steps: 1}",
        "version: 1\nworkload: {target: t, mask_token: 7}\ntraining: {steps: 1, betas: [0.5]}",
        "version: 1\nworkload: {target: t, mask_token: 7, steps: 1}\ntraining: {steps: 1}",
        "version: 1\nworkload: {target: t, mask_token: 7}\ntraining: {steps: 1}\nassets: {a: {path: here}}",
        "version: 1\nworkload: {target: t, mask_token: 7}\ntraining: {steps: 1}\nassets: {a b: {path: /x}}",
        "version: 1\nworkload: {target: t, mask_token: 7}\ntraining: {steps: 1}\nassets: {a: {path: /x, sha256: 0}}",
        "version: 1\nworkload: {target: t, mask_token: 7}\ntraining: {steps: 1}\nenvironment: {python: '3.12'}",
        "version: 1\nworkload: {target: t, mask_token: 7}\ntraining: {steps: 1}\nenvironment: {lock: l, python: 3.12}",
        "version: 2\nworkload: {target: t, mask_token: 7}\ntraining: {steps: 1}",
    ],
}


def kind(path: Path) -> str:
    return "host" if path.parent.name == "hosts" else "playbook"


def accepts(which: str, data: object) -> bool:
    schema = json.loads((FOLDER / f"{which}.schema.json").read_text())
    return bool(jsonschema.Draft202012Validator(schema).is_valid(data))


def loads(which: str, path: Path) -> bool:
    try:
        if which == "host":
            data = read_document(path).data
            names = data.get("hosts", {path.stem: None}) if isinstance(data, dict) else []
            for name in names or ["x"]:
                load_host(name, path, env={}, last_host=None)
        else:
            load_playbook(str(path), sets=[])
    except ConfigError:
        return False
    return True


def test_the_committed_schemas_are_current() -> None:
    for path, text in texts().items():
        assert path.read_text(encoding="utf-8") == text, f"run: python -m dflash_ops.config.schema ({path.name})"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_examples_fit_and_name_their_schema(path: Path) -> None:
    assert accepts(kind(path), read_document(path).data)
    # also where `1e-3` is text, as it is to most YAML readers
    assert accepts(kind(path), yaml.safe_load(path.read_text()))
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", path.read_text())
    assert named
    assert (path.parent / named[1]).resolve() == FOLDER / f"{kind(path)}.schema.json"
    if kind(path) == "host":
        host, _ = load_host(None, path, env={}, last_host=None)
        assert host.name == path.stem.removesuffix(".example")


@pytest.mark.parametrize(
    ("which", "text", "good"),
    [
        (which, text, good)
        for group, good in ((GOOD, True), (BAD, False))
        for which, all_ in group.items()
        for text in all_
    ],
)
def test_schema_and_loader_agree(which: str, text: str, good: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert (accepts(which, read_document(path).data), loads(which, path)) == (good, good)


def test_the_container_example_explains_every_field() -> None:
    text = (bundled("hosts") / "ct200.example.yaml").read_text()
    schema = json.loads((FOLDER / "host.schema.json").read_text())["$defs"]
    for model in ("Host", "Ssh", "Pct"):
        for key in schema[model]["properties"]:
            assert key == "name" or re.search(rf"^\s*(# )?{key}:", text, re.M), key
