from __future__ import annotations

import pytest

from dflash_ops.transport.window import LEAST_BYTES, MOST_BYTES, window_for


@pytest.mark.parametrize(
    ("rtt_ms", "window"),
    [
        (0, LEAST_BYTES),
        (0.3, LEAST_BYTES),
        (9, LEAST_BYTES),
        (20, 4 << 20),
        (40, 8 << 20),
        (80, MOST_BYTES),
        (900, MOST_BYTES),
    ],
)
def test_a_window_is_what_a_round_trip_holds(rtt_ms: float, window: int) -> None:
    assert window_for(rtt_ms / 1000) == window
