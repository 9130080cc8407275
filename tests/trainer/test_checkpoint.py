"""Checkpoints: whole or absent, as serving engines load them, and checked to the last byte."""

from __future__ import annotations

import json

import pytest
import torch

from tests.trainer.drafting import CONFIG, brought_home, drafter
from trainer.checkpoint import CheckpointError, load_checkpoint, load_resume, save_checkpoint
from trainer.dflash_model import DFlashDrafter
from trainer.files import sha256_file

pytestmark = pytest.mark.torch

RESUME = {"adam.0.exp_avg": torch.arange(6.0).reshape(2, 3).T, "rng": torch.Generator().get_state(), "epoch": 3}


def save(out, step=80, dtype=torch.float32, **changes):
    values = {"state": drafter(1, dtype).state_dict(), "resume": RESUME, **changes}
    return save_checkpoint(out, step, values["state"], CONFIG, values["resume"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_comes_back_bit_for_bit(tmp_path, dtype):
    path = save(tmp_path, dtype=dtype)
    assert path == tmp_path / "step-000080"
    assert [p.name for p in tmp_path.iterdir()] == ["step-000080"]
    config, state = load_checkpoint(path)
    assert config == CONFIG
    wanted = drafter(1, dtype).state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert state[name].dtype == dtype
        assert torch.equal(state[name], tensor), name
    DFlashDrafter(config, dtype=dtype).load_state_dict(state, strict=True)
    resume = load_resume(path)
    assert resume.state == {"epoch": 3}
    assert resume.tensors.keys() == {"adam.0.exp_avg", "rng"}
    assert torch.equal(resume.tensors["adam.0.exp_avg"], RESUME["adam.0.exp_avg"])
    assert torch.equal(resume.tensors["rng"], RESUME["rng"])


def test_the_folder_is_what_the_contract_and_serving_engines_expect(tmp_path):
    path = save(tmp_path, dtype=torch.bfloat16)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["v"], manifest["kind"], manifest["step"]) == (1, "checkpoint", 80)
    files = {p.relative_to(path).as_posix(): p for p in path.rglob("*") if p.is_file()}
    assert {f["path"]: f["role"] for f in manifest["files"]} == {
        "model.safetensors": "weights",
        "config.json": "config",
        "resume/optimizer.safetensors": "resume",
        "resume/state.json": "resume",
    }
    assert files.keys() == {f["path"] for f in manifest["files"]} | {"manifest.json"}
    for entry in manifest["files"]:
        assert entry["size"] == files[entry["path"]].stat().st_size
        assert entry["sha256"] == sha256_file(files[entry["path"]])
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (config["model_type"], config["dtype"], config["block_size"]) == ("qwen3", "bfloat16", 4)
    assert config["dflash_config"] == {"mask_token_id": 39, "target_layer_ids": [1, 3]}
    assert config["layer_types"] == ["full_attention"] * 2


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: without(s, "layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight is missing"),
        (
            lambda s: {**without(s, "hidden_norm.weight"), "hidden_norms.weight": s["hidden_norm.weight"]},
            "is it hidden_norms.weight",
        ),
        (lambda s: {**s, "lm_head.weight": torch.zeros(2)}, "lm_head.weight is not in the contract"),
        (lambda s: {**s, "fc.weight": s["fc.weight"].T.contiguous()}, r"fc.weight is \(32, 16\)"),
        (lambda s: {**s, "norm.weight": s["norm.weight"].bfloat16()}, "bfloat16, float32"),
    ],
)
def test_a_state_that_servers_would_not_load_is_not_written(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, state=change(drafter(1, torch.float32).state_dict()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "resume/optimizer.safetensors"])
def test_one_changed_byte_is_found(tmp_path, name):
    path = save(tmp_path)
    content = bytearray((path / name).read_bytes())
    content[-2] ^= 1
    (path / name).write_bytes(content)
    for load in (load_checkpoint, load_resume):
        with pytest.raises(CheckpointError, match="sha256"):
            load(path)


@pytest.mark.parametrize("name", ["model.safetensors", "resume/state.json", "manifest.json"])
def test_a_missing_or_short_file_is_found(tmp_path, name):
    path = save(tmp_path)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1])
    if name != "manifest.json":
        with pytest.raises(CheckpointError, match="the manifest says"):
            load_checkpoint(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=name if name == "manifest.json" else "missing"):
        load_checkpoint(path)


def rewrite(path, change):
    """Change config.json or the manifest and keep the manifest true, as a writer with other ideas would."""
    config, manifest = (json.loads((path / name).read_text()) for name in ("config.json", "manifest.json"))
    change(config, manifest)
    (path / "config.json").write_text(json.dumps(config))
    for entry in manifest["files"]:
        if entry["path"] == "config.json":
            entry.update(size=(path / "config.json").stat().st_size, sha256=sha256_file(path / "config.json"))
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, m: c.update(hidden_size=32), "its shape must be"),
        (lambda c, m: c.update(num_hidden_layers=3, layer_types=["full_attention"] * 3), "layers.2"),
        (lambda c, m: c.pop("rope_theta"), "rope_theta"),
        (lambda c, m: c.update(use_sliding_window=True), "use_sliding_window"),
        (lambda c, m: c.update(dtype="bfloat16"), "they must agree"),
        (lambda c, m: c["dflash_config"].update(block_size=8), "must be equal"),
        (lambda c, m: m.update(v=2), "version 1"),
        (lambda c, m: m["files"].pop(), "exactly"),
        (lambda c, m: m["files"][0].update(path="../model.safetensors"), "leaves the checkpoint"),
        (lambda c, m: m["files"][0].pop("sha256"), "not a list of path"),
    ],
)
def test_another_idea_of_a_checkpoint_is_refused(tmp_path, change, message):
    path = save(tmp_path)
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_a_complete_step_is_never_replaced_and_a_stale_part_is(tmp_path):
    path = save(tmp_path)
    before = sha256_file(path / "model.safetensors")
    with pytest.raises(CheckpointError, match="already"):
        save(tmp_path, state=drafter(2, torch.float32).state_dict())
    assert sha256_file(path / "model.safetensors") == before
    part = tmp_path / "step-000081.part"
    (part / "resume").mkdir(parents=True)
    (part / "left-over").write_text("torn")
    load_checkpoint(save(tmp_path, step=81))
    assert not part.exists()
    assert not (tmp_path / "step-000081" / "left-over").exists()


def test_a_write_that_fails_half_way_leaves_no_checkpoint(tmp_path):
    with pytest.raises(TypeError):
        save(tmp_path, resume={"epoch": object()})
    assert not (tmp_path / "step-000080").exists()
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_checkpoint(tmp_path / "step-000080.part")
    load_checkpoint(save(tmp_path))


def test_a_checkpoint_that_was_brought_home_has_weights_and_nothing_to_resume(tmp_path):
    path = brought_home(save(tmp_path))
    config, state = load_checkpoint(path, resumable=False)
    assert config == CONFIG
    assert torch.equal(state["fc.weight"], drafter(1, torch.float32).state_dict()["fc.weight"])
    for load in (load_checkpoint, load_resume):
        with pytest.raises(CheckpointError, match="exactly"):
            load(path)
    (path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="the manifest says"):
        load_checkpoint(path, resumable=False)


def test_tied_resume_tensors_are_both_kept(tmp_path):
    whole = torch.arange(10.0)
    path = save(tmp_path, resume={"head": whole[:5], "tail": whole[5:], "all": whole})
    tensors = load_resume(path).tensors
    assert tensors["tail"].tolist() == [5, 6, 7, 8, 9]
    assert tensors["all"].tolist() == whole.tolist()
