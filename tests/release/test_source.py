"""What of a source folder goes into a release, and what is recorded about it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflash_ops.release import Release, ReleaseError, Source, SourceKind, build, left_out
from tests.release.trees import commit, git, repository, write

PACKAGE = {"trainer/__init__.py": "", "trainer/__main__.py": "print('hi')\n", "trainer/a/b.py": "B = 1\n"}


def built(tmp_path: Path, source: Source, name: str = "out") -> Release:
    return build(source, [], settings={}, out=tmp_path / name)


def paths(release: Release) -> list[str]:
    return [file.path for file in release.manifest.files]


def refusal(tmp_path: Path, source: Source) -> ReleaseError:
    with pytest.raises(ReleaseError) as caught:
        built(tmp_path, source)
    assert not (tmp_path / "out").exists()
    return caught.value


def test_a_package_keeps_its_folder_and_untracked_files_stay_out(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", PACKAGE)
    write(repo, {"trainer/scratch.py": "x\n", "trainer/__pycache__/a.pyc": b"\0"})
    release = built(tmp_path, Source(repo / "trainer"))
    assert paths(release) == ["trainer/__init__.py", "trainer/__main__.py", "trainer/a/b.py"]
    assert (release.tree / "trainer/a/b.py").read_text() == "B = 1\n"
    assert (release.tree / "manifest.json").is_file()


def test_new_modules_that_stay_out_are_named(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {**PACKAGE, ".gitignore": "ignored.py\n"})
    write(repo, {"trainer/a/new.py": "x\n", "trainer/ignored.py": "x\n", "trainer/notes.txt": "x\n", "else.py": "x\n"})
    write(repo, {"trainer/named.py": "x\n"})
    assert left_out(Source(repo / "trainer", include=("named.py",))) == ("a/new.py",)
    assert left_out(Source(repo / "trainer", bundled=True)) == ()


def test_a_folder_that_is_no_package_is_the_root(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"src/train.py": "1\n", "src/lib/x.py": "2\n", "other.py": "3\n"})
    assert paths(built(tmp_path, Source(repo / "src"))) == ["lib/x.py", "train.py"]


def test_the_working_tree_counts_and_what_differs_from_the_commit_is_named(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {**PACKAGE, "trainer/gone.py": "1\n", "elsewhere.py": "1\n"})
    head = git(repo, "rev-parse", "HEAD").stdout.decode().strip()
    clean = built(tmp_path, Source(repo / "trainer"), "clean")
    assert clean.manifest.source.commit == head
    assert clean.manifest.source.dirty == ()

    write(repo, {"trainer/a/b.py": "B = 2\n", "trainer/named.json": "{}", "elsewhere.py": "2\n"})
    (repo / "trainer/gone.py").unlink()
    release = built(tmp_path, Source(repo / "trainer", include=("named.json",)))
    assert release.manifest.source.kind is SourceKind.GIT
    assert release.manifest.source.commit == head
    assert release.manifest.source.dirty == ("trainer/a/b.py", "trainer/gone.py", "trainer/named.json")
    assert (release.tree / "trainer/a/b.py").read_text() == "B = 2\n"
    assert "trainer/gone.py" not in paths(release)


def test_before_the_first_commit_all_is_dirty(tmp_path: Path) -> None:
    repo = write(tmp_path / "repo", {"a.py": "1\n"})
    git(repo, "init", "-q")
    git(repo, "add", "a.py")
    record = built(tmp_path, Source(repo)).manifest.source
    assert (record.commit, record.dirty) == (None, ("a.py",))


def test_include_takes_globs_and_folders(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"a.py": "1\n"})
    write(repo, {"gen/x.py": "1", "gen/deep/y.py": "2", "gen/__pycache__/x.pyc": b"", "z.txt": "3", "no.md": "4"})
    release = built(tmp_path, Source(repo, include=("gen", "*.txt")))
    assert paths(release) == ["a.py", "gen/deep/y.py", "gen/x.py", "z.txt"]


def test_include_that_names_nothing_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"data/prompts.jsonl": "1\n"})
    error = refusal(tmp_path, Source(repo, include=("data/promts.jsonl",)))
    assert "data/promts.jsonl" in error.what
    assert "data/prompts.jsonl" in error.fix


@pytest.mark.parametrize("pattern", ["../x.py", "/etc/hosts", "a/../../x"])
def test_include_stays_inside(tmp_path: Path, pattern: str) -> None:
    repo = repository(tmp_path / "repo", {"a.py": "1\n"})
    assert "inside" in refusal(tmp_path, Source(repo, include=(pattern,))).what


def test_include_never_takes_the_repository_itself(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"a.py": "1\n"})
    assert paths(built(tmp_path, Source(repo, include=("**/*",)))) == ["a.py"]


def test_a_folder_outside_git_needs_git_or_names(tmp_path: Path) -> None:
    folder = write(tmp_path / "plain", {"a.py": "1\n", "b.py": "2\n"})
    error = refusal(tmp_path, Source(folder))
    assert "git init" in error.fix
    assert "include" in error.fix
    release = built(tmp_path, Source(folder, include=("a.py",)))
    assert paths(release) == ["a.py"]
    assert release.manifest.source.kind is SourceKind.NAMED


def test_an_ignored_folder_of_a_repository_says_that_git_tracks_nothing(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"a.py": "1\n"})
    folder = write(repo / "sub", {"b.py": "1\n"})
    assert "git tracks no file" in refusal(tmp_path, Source(folder)).what


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path, Source(tmp_path / "nowhere")).what


def test_links_are_refused_by_name(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"real.py": "1\n"})
    (repo / "link.py").symlink_to("real.py")
    commit(repo)
    error = refusal(tmp_path, Source(repo))
    assert error.where == "link.py"
    assert "symbolic link" in error.what


def test_a_tracked_folder_replaced_by_a_link_is_refused(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"lib/a.py": "1\n", "b.py": "2\n"})
    write(tmp_path / "outside", {"a.py": "stolen\n"})
    shutil.rmtree(repo / "lib")
    (repo / "lib").symlink_to(tmp_path / "outside")
    assert refusal(tmp_path, Source(repo)).where == "lib"


def test_links_in_a_bundled_folder_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "wheel", {"a.py": "1\n"})
    (folder / "lib").symlink_to(tmp_path)
    assert refusal(tmp_path, Source(folder, bundled=True)).where == "lib"


def test_a_submodule_is_refused_until_its_files_are_named(tmp_path: Path) -> None:
    inner = repository(tmp_path / "inner", {"x.py": "1\n"})
    repo = repository(tmp_path / "repo", {"a.py": "1\n"})
    done = git(repo, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "sub")
    assert done.returncode == 0, done.stderr
    commit(repo)
    assert refusal(tmp_path, Source(repo)).where == "sub"
    assert "sub/x.py" in paths(built(tmp_path, Source(repo, include=("sub/*.py",))))


def test_a_checkout_and_an_installed_wheel_give_the_same_digest(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", PACKAGE)
    (repo / "trainer/__main__.py").chmod(0o755)
    commit(repo)
    installed = tmp_path / "site-packages/_bundled/trainer"
    shutil.copytree(repo / "trainer", installed)
    write(installed, {"__pycache__/__init__.cpython-311.pyc": b"\0", "a/__pycache__/b.pyc": b"\0"})
    (installed / "a/b.py").chmod(0o600)

    checkout = built(tmp_path, Source(repo / "trainer"), "one")
    wheel = built(tmp_path, Source(installed, bundled=True), "two")
    assert wheel.digest == checkout.digest
    assert wheel.manifest.source.kind is SourceKind.BUNDLED
    assert {file.path: file.mode for file in wheel.manifest.files} == {
        "trainer/__init__.py": 0o644,
        "trainer/__main__.py": 0o755,
        "trainer/a/b.py": 0o644,
    }


def test_a_repository_that_git_cannot_read_does_not_pass_for_none(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"a.py": "1\n"})
    (repo / ".git/config").write_text("[core\n")
    assert "git" in refusal(tmp_path, Source(repo, include=("a.py",))).what


def test_a_git_hook_s_variables_do_not_lead_to_another_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = repository(tmp_path / "repo", {"a.py": "1\n"})
    other = repository(tmp_path / "other", {"b.py": "1\n"})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert paths(built(tmp_path, Source(repo))) == ["a.py"]
