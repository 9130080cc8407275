"""Secrets and weights are refused by name and by content."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from dflash_ops.release import ReleaseError, Source, build
from tests.release.trees import repository


def refusal(tmp_path: Path, name: str, content: bytes) -> ReleaseError:
    repo = repository(tmp_path / "repo", {"ok.py": "1\n", name: content})
    with pytest.raises(ReleaseError) as caught:
        build(Source(repo), [], settings={}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert caught.value.where == name
    return caught.value


@pytest.mark.parametrize(
    "name",
    [
        ".env",
        "conf/.env.production",
        "server.pem",
        "SERVER.PEM",
        "keys/id_rsa",
        "id_ed25519",
        ".netrc",
        ".ssh/config",
        ".aws/credentials",
    ],
)
def test_secrets_by_name(tmp_path: Path, name: str) -> None:
    assert "secret" in refusal(tmp_path, name, b"x\n").what


@pytest.mark.parametrize("name", ["m/model.safetensors", "a.gguf", "w.pt", "w.PTH", "x.ckpt"])
def test_weights_by_name(tmp_path: Path, name: str) -> None:
    assert "weights" in refusal(tmp_path, name, b"x\n").what


def test_a_large_bin_is_weights_and_a_small_one_is_not(tmp_path: Path) -> None:
    assert "weights" in refusal(tmp_path, "pytorch_model.bin", b"\1" * (1024 * 1024 + 1)).what
    repo = repository(tmp_path / "small", {"table.bin": b"\1" * 1024})
    assert build(Source(repo), [], settings={}, out=tmp_path / "out").manifest.files[0].path == "table.bin"


def test_a_file_over_16_mib(tmp_path: Path) -> None:
    assert "16777216" in refusal(tmp_path, "data.jsonl", b"x" * (16 * 1024 * 1024 + 1)).what


@pytest.mark.parametrize("form", ["OpenSSH", "PKCS8", "TraditionalOpenSSL"])
def test_private_keys_by_content(tmp_path: Path, form: str) -> None:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        getattr(serialization.PrivateFormat, form),
        serialization.NoEncryption(),
    )
    assert "private key" in refusal(tmp_path, "notes.txt", b"KEY = '''\n" + key + b"'''\n").what


def test_a_public_key_and_text_about_keys_may_go_in(tmp_path: Path) -> None:
    text = "-----BEGIN PUBLIC KEY-----\nMFkw\n-----END PUBLIC KEY-----\n# never commit a PRIVATE KEY\n"
    repo = repository(tmp_path / "repo", {"id_ed25519.pub": "ssh-ed25519 AAAA me\n", "a.txt": text})
    assert len(build(Source(repo), [], settings={}, out=tmp_path / "out").manifest.files) == 2


def test_safetensors_by_content(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    safetensors = pytest.importorskip("safetensors.numpy")
    data = safetensors.save({"w": numpy.zeros(2, dtype=numpy.float32)})
    assert "safetensors" in refusal(tmp_path, "blob.dat", data).what


def test_gguf_and_torch_zip_by_content(tmp_path: Path) -> None:
    assert "GGUF" in refusal(tmp_path / "1", "blob.dat", b"GGUF\3\0\0\0").what
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02}.")
    assert "torch.save" in refusal(tmp_path / "2", "blob.dat", buffer.getvalue()).what


@pytest.mark.torch
@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saves_by_content(tmp_path: Path, zipped: bool) -> None:
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, buffer, _use_new_zipfile_serialization=zipped)
    assert "torch.save" in refusal(tmp_path, "blob.dat", buffer.getvalue()).what


def test_an_ordinary_zip_may_go_in(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("prompts.txt", "hello")
    repo = repository(tmp_path / "repo", {"prompts.zip": buffer.getvalue(), "e.bin": b"", "j.json": b"{" * 9})
    assert len(build(Source(repo), [], settings={}, out=tmp_path / "out").manifest.files) == 3


def test_a_patch_cannot_bring_a_secret_in(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"ok.py": "1\n"})
    patch = tmp_path / "add.patch"
    patch.write_text("--- /dev/null\n+++ b/.env\n@@ -0,0 +1 @@\n+TOKEN=1\n")
    with pytest.raises(ReleaseError, match="secret"):
        build(Source(repo), [patch], settings={}, out=tmp_path / "out")


def test_a_control_character_in_a_name(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"a\x1b[2J.py": "1\n"})
    with pytest.raises(ReleaseError, match="control character") as caught:
        build(Source(repo), [], settings={}, out=tmp_path / "out")
    assert "\x1b" not in str(caught.value)
