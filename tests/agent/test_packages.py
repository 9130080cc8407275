"""The packages of a Python are listed as importlib.metadata lists them, wherever they are."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from dflash_ops.agent.pythons import probe
from tests.agent.client import bare_python

REFERENCE = """
import importlib.metadata, json
found = {}
for item in importlib.metadata.distributions():
    name = item.metadata["Name"]
    if name and item.version:
        found.setdefault(name.lower().replace("_", "-").replace(".", "-"), item.version)
print(json.dumps(found))
"""
FINDER = """
import importlib.metadata, pathlib, sys
class Finder(importlib.metadata.DistributionFinder):
    def find_spec(self, *_):
        return None
    def find_distributions(self, context=None):
        yield importlib.metadata.Distribution.at(pathlib.Path({place!r}))
sys.meta_path.append(Finder())
"""


def metadata(name: str, version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: not-this\n"


def install(folder: Path, name: str, version: str, *, kind: str = "dist-info", file: str | None = "METADATA") -> Path:
    """`file` None: the record itself is the file."""
    place = folder / f"{name.replace('-', '_')}-{version}.{kind}"
    folder.mkdir(exist_ok=True)
    if file is None:
        place.write_text(metadata(name, version))
    else:
        place.mkdir()
        (place / file).write_text(metadata(name, version))
    return place


def python_with(folder: Path, *paths: Path) -> str:
    script = folder / "python3"
    listed = ":".join(map(str, paths))
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{listed}" exec {bare_python()} "$@"\n')
    script.chmod(0o755)
    return str(script)


def listed(python: str) -> dict[str, str]:
    found = probe(python)
    done = subprocess.run([python, "-c", REFERENCE], cwd="/", capture_output=True, text=True, check=True)
    assert found.packages == json.loads(done.stdout)
    assert found.version == sys.version.split()[0]
    return found.packages


def test_records_of_every_kind_in_folders(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    install(first, "Wheel.Like", "1.0")
    install(first, "egg-folder", "2.0", kind="egg-info", file="PKG-INFO")
    install(first, "egg-file", "3.0", kind="egg-info", file=None)
    # the first folder on the path is what would be imported
    install(second, "egg-file", "9.9")
    (first / "empty-1.0.dist-info").mkdir()
    (first / "nameless-1.0.dist-info").mkdir()
    (first / "nameless-1.0.dist-info" / "METADATA").write_text("Version: 1.0\n")
    (first / "plain.txt").write_text("Name: nobody\nVersion: 1\n")
    found = listed(python_with(tmp_path, first, tmp_path / "missing", second))
    assert found == {"wheel-like": "1.0", "egg-folder": "2.0", "egg-file": "3.0"}


def test_a_zip_on_the_path(tmp_path: Path) -> None:
    archive = tmp_path / "zipped.whl"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("zipped-4.0.dist-info/METADATA", metadata("zipped", "4.0"))
    install(tmp_path / "first", "beside", "1.0")
    assert listed(python_with(tmp_path, tmp_path / "first", archive)) == {"beside": "1.0", "zipped": "4.0"}


def test_an_egg_on_the_path(tmp_path: Path) -> None:
    egg = tmp_path / "inside-5.0.egg"
    (egg / "EGG-INFO").mkdir(parents=True)
    (egg / "EGG-INFO" / "PKG-INFO").write_text(metadata("inside", "5.0"))
    assert listed(python_with(tmp_path, egg)) == {"inside": "5.0"}


def test_a_finder_of_somebodys_own(tmp_path: Path) -> None:
    hidden = install(tmp_path / "hidden", "found", "6.0")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FINDER.format(place=str(hidden)))
    assert listed(python_with(tmp_path, tmp_path / "site")) == {"found": "6.0"}
