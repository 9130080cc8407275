"""A fingerprint tells the content, whoever takes it and wherever it lies."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from dflash_ops.agent import fingerprints
from dflash_ops.agent.fingerprints import BadAsset, HashCache, content_of


@pytest.fixture
def cache(tmp_path: Path) -> HashCache:
    return HashCache(tmp_path / "fingerprints.json")


def tree(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def settle(folder: Path) -> None:
    """As if it had been there for long."""
    for path in folder.rglob("*"):
        os.utime(path, (1000, 1000), follow_symlinks=False)


def test_of_a_file_it_is_what_sha256sum_says(tmp_path: Path, cache: HashCache) -> None:
    tree(tmp_path, weights="some weights")
    content = content_of(tmp_path / "weights", cache)
    assert content.fingerprint == hashlib.sha256(b"some weights").hexdigest()
    assert (content.single, content.size) == (True, 12)


def test_of_a_folder_it_is_as_documented(tmp_path: Path, cache: HashCache) -> None:
    folder = tree(tmp_path / "model", config="{}", a__b="x", **{".cache": "junk"})
    listed = [["a/b", 1, hashlib.sha256(b"x").hexdigest()], ["config", 2, hashlib.sha256(b"{}").hexdigest()]]
    expected = hashlib.sha256(json.dumps(listed, separators=(",", ":")).encode()).hexdigest()
    assert content_of(folder, cache).fingerprint == expected
    # neither times nor the place nor links to the same bytes change it
    other = tree(tmp_path / "other", config="{}", blobs="x")
    (other / "blobs").rename(tmp_path / "blob")
    (other / "a").mkdir()
    (other / "a" / "b").symlink_to(tmp_path / "blob")
    settle(other)
    assert content_of(other, cache).fingerprint == expected
    for change in ({"config": "[]"}, {"more": ""}):
        assert content_of(tree(tmp_path / "model", **change), cache).fingerprint != expected


def test_what_was_hashed_is_not_read_again_until_it_changes(
    tmp_path: Path, cache: HashCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tree(tmp_path / "model", a="1", b="2")
    settle(folder)
    first = content_of(folder, cache)
    read: list[int] = []
    real = fingerprints.sha256_stream
    monkeypatch.setattr(fingerprints, "sha256_stream", lambda *given: (read.append(1), real(*given))[1])
    again = HashCache(cache.path)
    assert content_of(folder, again) == first
    assert read == []
    tree(folder, b="3")
    assert content_of(folder, HashCache(cache.path)).fingerprint != first.fingerprint
    assert len(read) == 1
    # written just now: nobody could tell another write in the same tick
    content_of(folder, HashCache(cache.path))
    assert len(read) == 2


def test_a_damaged_cache_is_none(tmp_path: Path) -> None:
    path = tmp_path / "fingerprints.json"
    for text in ("", "[1]", '{"1:2": 3}', '{"1:2": [1, 2]}'):
        path.write_text(text)
        tree(tmp_path, weights="w")
        assert content_of(tmp_path / "weights", HashCache(path)).fingerprint == hashlib.sha256(b"w").hexdigest()


def test_what_can_have_no_fingerprint(tmp_path: Path, cache: HashCache) -> None:
    os.mkfifo(tree(tmp_path / "pipe", a="1") / "b")
    (tree(tmp_path / "linked", a="1") / "folder").symlink_to(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty").mkdir()
    (tree(tmp_path / "dangling", a="1") / "b").symlink_to(tmp_path / "nowhere")
    for name in ("pipe", "linked", "loop", "empty", "dangling", "nothing"):
        with pytest.raises((BadAsset, OSError)):
            content_of(tmp_path / name, cache)


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, cache: HashCache) -> None:
    link = tree(tmp_path / "folder", a="1") / "b"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadAsset) as told:
        content_of(tmp_path / "folder", cache)
    assert str(told.value) == f"{link}: No such file or directory"


def test_a_fingerprint_is_made_once(tmp_path: Path, cache: HashCache) -> None:
    """It is asked for with each file that is sent: made anew each time, 30 000 files took an hour of computing."""
    content = content_of(tree(tmp_path / "folder", a="1", b="2"), cache)
    assert content.fingerprint is content.fingerprint
