"""What a failed capture means, in plain words."""

from __future__ import annotations

import torch

_SIGNS = ("captur", "recording to mempool")


class CaptureError(RuntimeError):
    """A CUDA graph could not be captured. The process cannot be trusted with graphs any more: it must end."""


def is_capture_error(error: BaseException) -> bool:
    """Whether `error`, or what it followed, came from a capture and does not say so plainly yet."""
    return not isinstance(error, CaptureError) and any(_signed(each) for each in _chain(error))


def capture_error(what: str, device: torch.device, error: BaseException) -> CaptureError:
    """Says which capture failed, with the first error's own words, and what usually does it."""
    first = [each for each in [error, *_chain(error)] if each is error or _signed(each)][-1]
    words = str(first).strip().splitlines() or [""]
    return CaptureError(
        f"{what} could not be captured in a CUDA graph on {device}: {type(first).__name__}: {words[0]}\n"
        "What usually does it: another thread worked on this GPU during the capture (allocated, synchronised the "
        "device, or drew from its default generator): everything must stay behind the gate until the last capture. Or "
        "the step itself waits for the GPU: .item(), float() or bool() of a tensor, printing one, a copy from or to "
        "the host.\n"
        "A process whose capture failed cannot capture reliably again: this run ends."
    )


def _signed(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def _chain(error: BaseException) -> list[BaseException]:
    """`error`, then what it followed: the first one last."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__
    return found
