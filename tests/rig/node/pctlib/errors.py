"""How pct fails."""


class PctError(Exception):
    """A failure before any worker was forked: `message` goes to standard error, `status` is the exit status.

    Perl's `die` exits with errno where that is set, else 255; a refused argument exits with 2.
    """

    def __init__(self, message: str, status: int = 255) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
