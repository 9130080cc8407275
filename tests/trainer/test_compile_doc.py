"""The example of docs/compile.md runs and trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch


def test_the_example_trains_two_replicas() -> None:
    page = (Path(__file__).parents[2] / "docs/compile.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    assert 'STRATEGIES["whole-step"]' in code
    names: dict[str, Any] = {}
    # not compiled: what this is about is the example, and compiling it costs half a minute on a CPU
    exec(code.replace('STRATEGIES["whole-step"]', 'STRATEGIES["eager"]'), names)
    for losses in names["losses"]:
        assert len(losses) == names["steps"]
        assert sum(losses[-4:]) < sum(losses[:4]) / 2
