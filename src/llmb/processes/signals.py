# SPDX-License-Identifier: Apache-2.0
"""Signals that end what was started here."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The run was ended from outside: Ctrl-C, a closed terminal, or SIGTERM from a scheduler."""


class SignalGate:
    """Defers the signal that ends a run until the code that ends the run's processes is ready."""

    def __init__(self) -> None:
        self.open = False
        self.name: str | None = None

    def take(self, number: int, frame: object) -> None:  # noqa: ARG002 (as the signal module calls it)
        for other in ENDING:
            signal.signal(other, signal.SIG_IGN)
        self.name = signal.Signals(number).name
        if self.open:
            raise Interrupted(self.name)

    def let_through(self) -> None:
        """Raises Interrupted if a signal has already arrived."""
        self.open = True
        if self.name:
            raise Interrupted(self.name)


@contextmanager
def signals_as_exceptions() -> Iterator[SignalGate]:
    """The first signal that ends a run raises Interrupted, once it is let through; further ones are ignored.

    Without that, a signal during the start of a process would leave the process behind.
    """
    gate = SignalGate()
    previous = {number: signal.signal(number, gate.take) for number in ENDING}
    try:
        yield gate
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
