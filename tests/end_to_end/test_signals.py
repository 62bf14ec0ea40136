# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and its like leave nothing behind, whenever they come."""

import os
import signal

import pytest
import typer

from llmb.base.processes import Interrupted, signals_as_exceptions
from llmb.cli.main import exit_code_of


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_while_a_process_is_started_waits_until_it_can_be_ended(number: signal.Signals) -> None:
    handler = signal.getsignal(number)
    started = False
    with pytest.raises(Interrupted, match=number.name), signals_as_exceptions() as signals:
        os.kill(os.getpid(), number)
        started = True
        signals.let_through()
    assert started
    assert signal.getsignal(number) is handler


def test_a_signal_that_comes_later_is_raised_at_once() -> None:
    with pytest.raises(Interrupted, match="SIGTERM"), signals_as_exceptions() as signals:
        signals.let_through()
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal was held back")


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (typer.Exit(1), 1)])
def test_ctrl_c_is_told_from_other_ends_of_a_command(error: BaseException, code: int) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command() -> None:
        raise error

    assert exit_code_of(app, []) == code
