"""Playbooks: what is refused and how it is told; `--set`; the settings that the trainer gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_ops.config import ConfigError, Playbook, bundled, load_playbook
from dflash_ops.config.schema import host_schema, playbook_schema
from dflash_ops.config.training import Training
from dflash_ops.config.workload import Workload

ROOT = Path(__file__).parents[2]

SMALL = """\
version: 1
workload:
  target: model
  mask_token: <mask>
training:
  steps: 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "p.yaml") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def refused(name: str, *sets: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_playbook(name, sets=sets)
    return str(caught.value).splitlines()


def test_all_problems_at_once_each_with_line_and_nearest_key() -> None:
    name = write(
        """\
version: 1
workload:
  target: x
  steps: 4
  drafter_thread: 2
  dtype: float16
  mask_token: [a]
training:
  steps: 0
  learning_rat: 1
runn: {}
""",
        "playbooks/train.yaml",
    )
    assert refused(name) == [
        "playbooks/train.yaml:4: unknown key 'steps' in workload; it belongs in training",
        "playbooks/train.yaml:5: unknown key 'drafter_thread' in workload; did you mean 'drafter_threads'?",
        "playbooks/train.yaml:6: workload.dtype must be 'float32' or 'bfloat16', not \"float16\"; "
        "did you mean 'bfloat16'?",
        'playbooks/train.yaml:7: workload.mask_token must be text or a whole number, not ["a"]; '
        "put it in quotes if text is meant",
        "playbooks/train.yaml:9: training.steps must be from 1 to 1000000000, not 0",
        "playbooks/train.yaml:10: unknown key 'learning_rat' in training; did you mean 'learning_rate'?",
        "playbooks/train.yaml:11: unknown key 'runn'; did you mean 'run'?",
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("workload.require_cuda: yes", 'workload.require_cuda must be true or false, not "yes"'),
        ("workload.drafter_threads: '2'", 'workload.drafter_threads must be a whole number, not "2"'),
        ("workload.drafter_threads: true", "workload.drafter_threads must be a whole number, not true"),
        (
            "workload.gpus: [0, x]",
            'workload.gpus[1] must be a whole number or a UUID as `nvidia-smi -L` prints it, not "x"',
        ),
        ("workload.buckets: [64, 32]", "workload.buckets must be ascending, each number once, not [64, 32]"),
        ("workload.buckets: []", "workload.buckets must be a list of at least 1, not []"),
        (
            "workload.drafter_devices: [cpu, cpu]",
            "workload.drafter_devices names 2 devices, drafter_threads is 1; one entry for each",
        ),
        ("workload.target_devices: [gpu]", "workload.target_devices[0] must be 'cpu' or 'cuda:N', not \"gpu\""),
        ("workload.target: 7", "workload.target must be text, not 7; put it in quotes if text is meant"),
        ("training.betas: [0.9]", "training.betas has too few entries: [0.9]"),
        ("training.betas: [0.9, 1.0]", "training.betas[1] must be at least 0 and less than 1, not 1.0"),
        ("training.learning_rate: .inf", "training.learning_rate must be a finite number, not Infinity"),
        ("training.learning_rate: 0", "training.learning_rate must be greater than 0 and at most 1, not 0"),
        (f"training.log_every: {'9' * 23}", f"training.log_every must be from 1 to 1000000000, not {'9' * 23}"),
        (f"training.seed: {'9' * 23}", f"training.seed must be at least 0 and less than {2**63}, not {'9' * 23}"),
        ("training.clip: 1e300", "training.clip must be greater than 0 and at most 1000000000, not 1e+300"),
        ("run.stall_s: 1000000000", "run.stall_s must be from 0 to 315360000, not 1000000000"),
        ("run.grace_s: 1.5", "run.grace_s must be a whole number, not 1.5"),
        ("trainer.module: a-b", 'trainer.module must be a Python module\'s dotted name, not "a-b"'),
        (
            "trainer.source: nowhere",
            "there is no folder 'nowhere' (relative to the working directory); 'bundled' is the trainer "
            "that comes with dflash-ops",
        ),
        ("trainer.patches: [fix.patch]", "there is no file 'fix.patch' (relative to the working directory)"),
    ],
)
def test_a_wrong_value_is_told_at_its_line(line: str, told: str) -> None:
    path, value = line.split(": ", 1)
    section, key = path.split(".")
    text = SMALL.replace("  target: model\n", "") if key == "target" else SMALL
    if f"{section}:" in text:
        text = text.replace(f"{section}:\n", f"{section}:\n  {key}: {value}\n")
    else:
        text += f"{section}:\n  {key}: {value}\n"
    at = text.splitlines().index(f"  {key}: {value}") + 1
    assert refused(write(text)) == [f"p.yaml:{at}: {told}"]


def test_required_keys_and_sections() -> None:
    assert refused(write("training: {}\n")) == [
        "p.yaml:1: 'version', 'workload' are required",
        "p.yaml:1: 'steps' is required in training",
    ]
    assert refused(write("- 1\n")) == ["p.yaml:1: must be a mapping (key: value lines)"]
    assert refused(write(SMALL.replace("version: 1", "version: 2"))) == ["p.yaml:1: version must be 1, not 2"]
    assert refused(write("version: 1\nworkload: fast\ntraining: {steps: 1}\n")) == [
        'p.yaml:2: workload must be a section (key: value lines), not "fast"'
    ]


def test_set_takes_long_and_short_keys_and_yaml_values() -> None:
    book = load_playbook(
        write(SMALL),
        sets=["training.steps=7", "learning_rate=1e-4", "gpus=[0, GPU-1a-2b]", "prompts=x/y.jsonl", "data=", "seed=1"],
    )
    assert (book.training.steps, book.training.learning_rate, book.training.seed) == (7, 1e-4, 1)
    assert book.workload.gpus == (0, "GPU-1a-2b")
    assert (book.training.prompts, book.training.data) == ("x/y.jsonl", None)
    assert load_playbook("p.yaml", sets=["seed=1", "seed=2"]).training.seed == 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("stps=5", "unknown key 'stps'; did you mean 'steps'?"),
        ("training.step=5", "unknown key 'training.step'; did you mean 'training.steps'?"),
        ("zzz=5", "unknown key 'zzz'"),
        ("steps", "a value is missing; write --set key=value"),
        ("training=5", "'training' is a section; name a key in it: training.KEY=value"),
        ("steps=many", 'training.steps must be a whole number, not "many"'),
        ("betas={a: 1}", "takes one value or a flat list; edit the playbook for more"),
        ("target=*x", "not valid YAML: found undefined alias 'x'; put quotes around the value if text is meant"),
        ("trainer.patches=[a.patch]", "there is no file 'a.patch' (relative to the working directory)"),
    ],
)
def test_a_wrong_set_names_the_option(given: str, told: str) -> None:
    assert refused(write(SMALL), given) == [f"--set {given}: {told}"]


def test_set_problems_and_file_problems_keep_their_places() -> None:
    name = write(SMALL.replace("steps: 5", "steps: 5\n  seed: -1"))
    assert refused(name, "steps=0") == [
        "--set steps=0: training.steps must be from 1 to 1000000000, not 0",
        "p.yaml:7: training.seed must be at least 0 and less than 9223372036854775808, not -1",
    ]


def test_paths_of_the_trainer_are_the_playbooks_or_of_set_the_callers(folder: Path) -> None:
    write(SMALL + "trainer: {source: ../mine, patches: [a.patch]}\n", "books/p.yaml")
    write("", "books/a.patch")
    write("", "b.patch")
    Path("mine").mkdir()
    book = load_playbook("books/p.yaml", sets=[])
    assert book.trainer.folder == folder / "mine"
    assert book.trainer.patches == (str(folder / "books/a.patch"),)
    assert not book.trainer.is_bundled
    assert load_playbook("books/p.yaml", sets=["patches=[b.patch]"]).trainer.patches == (str(folder / "b.patch"),)
    assert load_playbook("books/p.yaml", sets=["source=bundled"]).trainer.folder == bundled("trainer")


def test_names_are_looked_up_here_then_in_the_users_configuration_then_bundled(folder: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(folder / "xdg")}
    assert load_playbook("quickstart", sets=[], env=env).workload.drafter_threads == 2
    write(SMALL, "xdg/dflash-ops/playbooks/quickstart.yaml")
    assert load_playbook("quickstart", sets=[], env=env).training.steps == 5
    write(SMALL.replace("5", "6"), "playbooks/quickstart.yml")
    book = load_playbook("quickstart", sets=[], env=env)
    assert (book.training.steps, book.name) == (6, "quickstart")
    assert refused("quikstart")[0].endswith("there is no playbook 'quikstart'; did you mean 'quickstart'?")
    assert refused("no/such.yaml") == ["no/such.yaml: there is no such playbook file"]


def test_the_settings_are_the_contracts() -> None:
    settings = load_playbook(write(SMALL), sets=[]).settings("r1", None, "/w/cache")
    assert {key: settings[key] for key in ("contract", "run", "prepared", "cache")} == {
        "contract": 1,
        "run": "r1",
        "prepared": None,
        "cache": "/w/cache",
    }
    assert settings["workload"]["buckets"] == [3072]
    assert settings["training"]["betas"] == [0.9, 0.95]


def test_keys_and_defaults_are_those_of_the_contracts_page() -> None:
    page = (ROOT / "docs/trainer-contract.md").read_text()
    for model in (Workload, Training):
        table = page.split(f"\n`{model.__name__.lower()}`:\n\n")[1].split("\n\n")[0].replace("\\|", "/")
        rows = [[cell.strip().strip("`") for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
        defaults = {
            key: "required" if field.is_required() else json.loads(json.dumps(field.default))
            for key, field in model.model_fields.items()
        }
        assert {key: literal(default) for key, _, default in rows} == defaults


def literal(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_the_bundled_playbooks_load() -> None:
    for name in ("quickstart", "train"):
        assert isinstance(load_playbook(name, sets=[]), Playbook)


def test_assets_are_named_and_their_uploads_are_relative_to_the_file() -> None:
    text = SMALL.replace("target: model", "target: asset:model")
    text += "  prompts: asset:questions\nassets:\n  model: {upload: weights/m}\n  questions: {path: /srv/q.jsonl}\n"
    playbook = load_playbook(write(text, "playbooks/p.yaml"))
    assert playbook.workload.target == "asset:model"
    assert playbook.assets["model"].upload == str(Path("playbooks/weights/m").absolute())
    assert playbook.assets["questions"].path == "/srv/q.jsonl"


def test_problems_of_assets_are_told_at_their_line() -> None:
    text = SMALL.replace("target: model", "target: asset:modle")
    text += "assets:\n  model: {upload: a, path: /b}\n  other:\n    pth: /x\n    sha256: '12'\n  a b: {path: /x}\n"
    assert refused(write(text)) == [
        "p.yaml:3: there is no asset 'modle'; did you mean 'model'?",
        "p.yaml:8: assets.model needs either path (on the host) or upload (on this machine)",
        "p.yaml:10: unknown key 'pth' in assets.other; did you mean 'path'?",
        'p.yaml:11: assets.other.sha256 must be 64 lower-case hex digits, not "12"',
        "p.yaml:12: a key of assets must be letters, digits, '.', '_' or '-' (first a letter or digit), not \"a b\"",
    ]
    assert refused(write(SMALL), "target=asset:x") == [
        "--set target=asset:x: there is no asset 'x'; name it in the section 'assets'"
    ]


def test_the_names_of_assets_are_no_settings() -> None:
    text = SMALL + "assets: {model: {path: /x}}\n"
    assert refused(write(text), "path=/y") == ["--set path=/y: unknown key 'path'; did you mean 'patches'?"]


def test_every_number_of_a_playbook_has_both_limits() -> None:
    """A slip of the finger is told here; in `chat_template_kwargs` stands whatever the template takes."""
    open_ended = []

    def look(part: object, place: str) -> None:
        if isinstance(part, dict):
            kind = part.get("type")
            low, high = {"minimum", "exclusiveMinimum"} & part.keys(), {"maximum", "exclusiveMaximum"} & part.keys()
            if kind in ("integer", "number") and "const" not in part and not (low and high):
                open_ended.append(place)
            for key, inner in part.items():
                look(inner, f"{place}.{key}")
        elif isinstance(part, list):
            for inner in part:
                look(inner, place)

    for made in (playbook_schema(), host_schema()):
        look(made, "")
    assert [place for place in open_ended if "chat_template_kwargs" not in place] == []
