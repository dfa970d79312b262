"""Stopping long work by SIGTERM or Ctrl-C, at a moment of its own choosing."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopSignal:
    """Remembers a request to stop; a second one interrupts at once. name: of the signal, None before one came.

    patient: a second one does not: a scheduler and torchrun both pass on the one request that the user made.
    """

    def __init__(self, patient: bool = False) -> None:
        self.name: str | None = None
        self.patient = patient

    @contextmanager
    def caught(self) -> Iterator[None]:
        """While this lasts, the two signals are remembered here; outside the main thread they are the caller's."""
        previous: dict[signal.Signals, Any] = {}
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                previous[number] = signal.signal(number, self._request)
        except ValueError:
            pass  # not the main thread
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _request(self, number: int, frame: object) -> None:
        if self.name and not self.patient:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
