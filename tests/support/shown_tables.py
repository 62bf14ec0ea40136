# SPDX-License-Identifier: Apache-2.0
"""Tables as a terminal without styles shows them."""

import re
from collections.abc import Iterable

from llmb.reports.table import Table, terminal_lines

STYLES = re.compile(r"\x1b\[[0-9;]*m")


def shown_lines(tables: Table | Iterable[Table], width: int = 80) -> list[str]:
    """Lines of all tables."""
    several = [tables] if isinstance(tables, Table) else tables
    return [STYLES.sub("", line).rstrip() for table in several for line in terminal_lines(table, width)]
