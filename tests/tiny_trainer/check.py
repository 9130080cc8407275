"""`check`: does this machine and this input fit the settings?"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

from . import files
from .data import load_rows, prepare_key, prepare_rows, read_prompts
from .errors import InputError
from .settings import Settings, load
from .target import load_target, mask_id
from .tuning import needs_tuning


def check(settings_file: Path, out: Path) -> list[InputError]:
    """Write `check.json`; returns the problems."""
    problems: list[InputError] = []
    prepare: dict[str, str] | None = None
    tune: dict[str, str] | None = None
    try:
        settings = load(settings_file)
    except InputError as error:
        problems.append(error)
    else:
        for look in (_devices, _target, _data):
            _try(look, settings, problems)
        if not problems and settings.training.data is None:
            count = len(prepare_rows(settings))
            prepare = {"key": prepare_key(settings), "why": f"{count} prompts, answered by the target"}
        if not problems:
            tune = needs_tuning(settings)
    value = {
        "contract": 1,
        "outcome": "refused" if problems else "ok",
        "problems": [{"what": p.what, "where": p.where, "fix": p.fix} for p in problems],
        "warnings": [],
        "prepare": prepare,
        "tune": tune,
        "devices": [_cpu()],
    }
    files.write_json(out / "check.json", value)
    return problems


def _try(look: Callable[[Settings], None], settings: Settings, problems: list[InputError]) -> None:
    try:
        look(settings)
    except InputError as error:
        if str(error) not in {str(known) for known in problems}:
            problems.append(error)


def _cpu() -> dict[str, Any]:
    pages = Path("/proc/meminfo").read_text(encoding="ascii").split()
    return {"device": "cpu", "uuid": "cpu", "name": "cpu", "memory_bytes": int(pages[1]) * 1024}


def _devices(settings: Settings) -> None:
    workload = settings.workload
    if workload.require_cuda:
        raise InputError("CUDA is required and there is none", "workload.require_cuda", "set it to false")
    for key in ("drafter_devices", "target_devices"):
        devices = getattr(workload, key)
        for device in devices if devices != "auto" else []:
            if device != "cpu":
                raise InputError(f"{device!r} is not on this machine", f"workload.{key}", 'give "cpu"')


def _target(settings: Settings) -> None:
    mask_id(load_target(settings.workload.target), settings.workload.mask_token)


def _data(settings: Settings) -> None:
    target = load_target(settings.workload.target)
    mask = mask_id(target, settings.workload.mask_token)
    if settings.training.data is not None:
        load_rows(settings, mask)
    elif settings.training.prompts is None:
        raise InputError("neither data nor prompts are given", "training.data", "set training.prompts")
    read_prompts(settings.training, target)
    for row in prepare_rows(settings) if settings.training.prompts is not None else []:
        if mask in row.input_ids:
            fix = "choose a reserved token"
            raise InputError(f"the mask token {mask} occurs in prompt {row.id}", "workload.mask_token", fix)
