"""A `prepare` that was cut off anywhere goes on where it was, and makes the same data bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from trainer import progress
from trainer.errors import InputError
from trainer.journal import JournalFile
from trainer.prepare import prepare
from trainer.settings import Settings, settings_from_json

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
JOURNAL = "answers.ndjson"


def files_of(folder: Path) -> dict[str, bytes]:
    """What was made, by name; how long it took is no part of it."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    facts = json.loads(found["prepare.json"])
    del facts["seconds"]
    return {**found, "prepare.json": json.dumps(facts).encode()}


def made_with_its_journal(settings: Settings, out: Path) -> tuple[dict[str, bytes], bytes]:
    """An undisturbed prepare: its files, and all that its journal had when it was done."""
    out.mkdir()
    kept = out.parent / "kept"
    # a second name for the file that prepare deletes at its end
    (out / JOURNAL).touch()
    os.link(out / JOURNAL, kept)
    prepare(settings, out)
    return files_of(out), kept.read_bytes()


@pytest.fixture
def settings(make_settings: Any) -> Settings:
    return settings_from_json(make_settings(answer_batch=5, answer_tokens=6))


def test_cut_off_after_any_number_of_bytes(settings: Settings, tmp_path: Path) -> None:
    whole, journal = made_with_its_journal(settings, tmp_path / "whole")
    assert JOURNAL not in whole
    lines = journal.splitlines(keepends=True)
    assert [len(json.loads(line).get("rows", [])) for line in lines] == [0, 5, 5, 2]
    starts = [sum(len(line) for line in lines[:count]) for count in range(len(lines) + 1)]
    cuts = {0, 7, *starts[1:], starts[1] + 1, starts[2] - 1, starts[3] + 20}
    for cut in sorted(cuts):
        out = tmp_path / f"cut-{cut}"
        out.mkdir()
        (out / JOURNAL).write_bytes(journal[:cut])
        prepare(settings, out)
        assert files_of(out) == whole, cut


@pytest.mark.parametrize("source", ["prompts", "messages"])
def test_it_shows_on_the_disk_that_it_goes_on(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """A host ends a `prepare` in whose folder nothing changes: rendering writes nothing, and may take an hour."""
    talk = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    datasets.Dataset.from_dict({"messages": [talk] * 4}).save_to_disk(str(tmp_path / "data"))
    given = {"data": str(tmp_path / "data"), "prompts": None} if source == "messages" else {"prompt_count": 4}
    raw, out = make_settings(**given, evaluation_prompts=1), tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    beats: list[float] = []
    beat = JournalFile.beat

    def counted(file: JournalFile) -> None:
        os.utime(out / JOURNAL, (1, 1))
        beat(file)
        beats.append((out / JOURNAL).stat().st_mtime)

    monkeypatch.setattr(JournalFile, "beat", counted)
    prepare(settings_from_json(raw), out)
    assert len(beats) == 4
    assert min(beats) > 1


def test_answers_that_are_there_are_not_made_again(settings: Settings, tmp_path: Path) -> None:
    whole, journal = made_with_its_journal(settings, tmp_path / "whole")
    lines = journal.splitlines(keepends=True)
    first = json.loads(lines[1])
    first["answers"][0] = [8, 8, 8]
    out = tmp_path / "out"
    out.mkdir()
    (out / JOURNAL).write_bytes(lines[0] + json.dumps(first).encode() + b"\n")
    prepare(settings, out)
    changed = {name for name, data in files_of(out).items() if data != whole[name]}
    # the marked answer is in the data: it was read, not made
    assert any(name.endswith(".arrow") for name in changed)


def test_a_damaged_line_costs_what_follows_it_and_nothing_else(settings: Settings, tmp_path: Path) -> None:
    whole, journal = made_with_its_journal(settings, tmp_path / "whole")
    lines = journal.splitlines(keepends=True)
    out = tmp_path / "out"
    out.mkdir()
    (out / JOURNAL).write_bytes(b"".join([*lines[:2], b"\0" * 40 + b"\n", *lines[3:]]))
    prepare(settings, out)
    assert files_of(out) == whole


def test_a_folder_of_other_data_is_refused_and_untouched(
    settings: Settings, make_settings: Any, tmp_path: Path
) -> None:
    whole, journal = made_with_its_journal(settings, tmp_path / "whole")
    out = tmp_path / "out"
    out.mkdir()
    (out / JOURNAL).write_bytes(journal)
    other = settings_from_json(make_settings(answer_batch=5, answer_tokens=7))
    with pytest.raises(InputError, match="other settings"):
        prepare(other, out)
    assert (out / JOURNAL).read_bytes() == journal
    with pytest.raises(InputError, match="data of other settings"):
        prepare(other, tmp_path / "whole")
    assert files_of(tmp_path / "whole") == whole
    # the same data again: nothing to do
    prepare(settings, tmp_path / "whole")
    assert files_of(tmp_path / "whole") == whole


# runs the verb as the contract does; after two pieces of work the process gets a real signal
STRUCK = """
import os, runpy, signal, sys
from trainer.journal import Journal
append, count, number = Journal.append, 0, int(sys.argv.pop())
def struck(self, turn, answers):
    global count
    append(self, turn, answers)
    count += 1
    if count == 2:
        os.kill(os.getpid(), number)
Journal.append = struck
sys.argv[0] = "trainer"
runpy.run_module("trainer", run_name="__main__")
"""


@pytest.mark.slow
def test_a_process_that_was_stopped_and_then_killed_goes_on(make_settings: Any, tmp_path: Path) -> None:
    raw = make_settings(answer_batch=2, answer_tokens=6)
    whole, _ = made_with_its_journal(settings_from_json(raw), tmp_path / "whole")
    file, out = tmp_path / "settings.json", tmp_path / "out"
    file.write_text(json.dumps(raw))
    verb = ["prepare", "--settings", str(file), "--out", str(out)]
    for number, lines in ((signal.SIGTERM, 3), (signal.SIGKILL, 5)):
        killed = subprocess.run([sys.executable, "-c", STRUCK, *verb, str(int(number))], cwd=ROOT, check=False)
        assert killed.returncode == -number
        assert not (out / "prepare.json").exists()
        assert len((out / JOURNAL).read_bytes().splitlines()) == lines
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", *verb], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "8 of 12 prompts answered: from an earlier prepare" in ended.stdout
    assert files_of(out) == whole
