"""YAML: what is read, what is refused, and at which line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_ops.config.document import parse_document, read_document
from dflash_ops.config.errors import ConfigError


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "f.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("6.0e4", 60000.0),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("22:22", "22:22"),
        ("2026-11-29", "2026-11-29"),
        ("1_000", "1_000"),
        ("~", None),
        ("null", None),
        ("'12'", "12"),
        ("package:llm/x.gguf", "package:llm/x.gguf"),
        ("[1, a, 2.5]", [1, "a", 2.5]),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    data = parse_document(text, "f.yaml").data
    assert (data, type(data)) == (value, type(value))


def test_each_key_and_item_knows_its_line() -> None:
    document = parse_document("a: 1\nb:\n  c: 2\n  d:\n    - x\n    - y\n", "f.yaml")
    assert document.line(("a",)) == 1
    assert document.line(("b", "c")) == 3
    assert document.line(("b", "d", 1)) == 6
    assert document.line(("b", "not there")) == 2


def test_a_key_given_twice_names_both_lines() -> None:
    assert (
        refused("steps: 1\nseed: 2\nsteps: 3\n")
        == "f.yaml:3: the key 'steps' stands here twice; the first is on line 1"
    )


def test_several_problems_come_one_a_line() -> None:
    assert refused("a: 1\na: 2\n3: x\n").splitlines() == [
        "f.yaml:2: the key 'a' stands here twice; the first is on line 1",
        "f.yaml:3: the key 3 is not text; put it in quotes",
    ]


def test_merge_keys_fill_in_what_is_not_given() -> None:
    document = parse_document("base: &b {x: 1, y: 2}\nhost:\n  <<: *b\n  y: 3\n", "f.yaml")
    assert document.data == {"base": {"x": 1, "y": 2}, "host": {"x": 1, "y": 3}}
    assert (document.line(("host", "x")), document.line(("host", "y"))) == (1, 4)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['id']", "!!binary aGk=", "!own x", "!!set {a}"])
def test_tags_make_no_objects(tag: str) -> None:
    assert "is not allowed here" in refused(f"x: {tag}\n")


def test_a_number_that_is_none_is_refused() -> None:
    assert refused("x: !!int abc\n") == "f.yaml:1: 'abc' is not of the tag tag:yaml.org,2002:int"


def test_billion_laughs_stop_early() -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "expand without bound" in refused("\n".join(lines))


def test_an_alias_of_itself_is_refused() -> None:
    assert "expand without bound" in refused("a: &a\n  b: *a\n")


def test_deep_nesting_is_refused() -> None:
    assert "nested deeper than 32 levels" in refused("[" * 5000)
    assert parse_document("[" * 30 + "]" * 30, "f.yaml").data


def test_too_many_values_are_refused() -> None:
    assert "over 20000 values" in refused("\n".join(f"- {n}" for n in range(20_001)))


def test_broken_yaml_names_its_line() -> None:
    assert refused("a: 1\nb: [1, 2\nc: 3\n").startswith("f.yaml:3: not valid YAML: ")
    assert refused("a: b: c\n").startswith("f.yaml:1: not valid YAML: ")
    assert refused("a: 1\n---\nb: 2\n").startswith("f.yaml:2: not valid YAML: ")
    assert refused("a: \x07\n").startswith("f.yaml: not valid YAML: ")
    assert refused("# only a comment\n") == "f.yaml: is empty"


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("big.yaml").write_text("# " + "x" * 1024 * 1024)
    Path("latin.yaml").write_bytes(b"a: 1\nb: \xff\n")
    os.mkfifo("pipe.yaml")
    Path("folder.yaml").mkdir()
    for name, text in {
        "pipe.yaml": "pipe.yaml: is no regular file",
        "folder.yaml": "folder.yaml: ",
        "/dev/zero": "/dev/zero: is no regular file",
        "a\0b": "'a\\x00b': is no name of a file",
        "x" * 5000: "x",
        "big.yaml": "big.yaml: is larger than 1024 KiB",
        "latin.yaml": "latin.yaml:2: is not UTF-8 text",
        "none.yaml": "none.yaml: cannot be read: No such file or directory",
    }.items():
        with pytest.raises(ConfigError) as caught:
            read_document(Path(name))
        assert str(caught.value).startswith(text)
        assert caught.value.exit_code == 2
