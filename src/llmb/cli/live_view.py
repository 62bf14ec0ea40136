# SPDX-License-Identifier: Apache-2.0
"""Shows a run that is watched: as a view that is drawn again and again in a terminal, or as lines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from llmb.analysis.watched import Kind, Outlook
from llmb.report.table import table_lines
from llmb.report.watch_report import MOST_STEPS, WatchedTitle, watch_line, watch_tables

Show = Callable[[Outlook], None]
OTHER_LINES = 4
"""The headings of the steps, the empty line before them, and the cursor's."""


@contextmanager
def live_view(title: WatchedTitle) -> Iterator[Show]:
    """In a terminal; nothing of it is left at the end."""
    console = Console()
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(seen: Outlook) -> None:
            live.update(frame(title, seen, console.width, console.height), refresh=True)

        yield show


def frame(title: WatchedTitle, seen: Outlook, width: int, height: int) -> Text:
    """As many of the last steps as there are lines for."""
    first, *_ = watch_tables(title, seen, 0)
    space = height - len(list(table_lines(first, width))) - OTHER_LINES
    lines: list[Text] = []
    for table in watch_tables(title, seen, min(MOST_STEPS, space)):
        lines += [Text()] if lines else []
        for line in table_lines(table, width):
            style = "bold" if line.is_heading else "bold red" if line.text.startswith("WARNING") else ""
            lines.append(Text(line.text, style))
    return Text("\n").join(lines)


class LineView:
    """Writes a line when there is something new, and one for each new warning."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.told: set[Kind] = set()
        self.last: tuple[object, ...] | None = None

    def show(self, seen: Outlook) -> None:
        here = seen.circumstances
        news = (here.state, here.why, here.attempt, seen.done)
        if news != self.last:
            self.write(watch_line(seen))
        for concern in seen.concerns:
            if concern.kind not in self.told:
                self.write(f"WARNING: {concern.text}")
        self.last, self.told = news, {concern.kind for concern in seen.concerns}
