# SPDX-License-Identifier: Apache-2.0
"""What a bisection is about, and which runs it has, in a file that outlives every command."""

import re
from pathlib import Path

from pydantic import Field

from llmb.catalogue.records import Record
from llmb.errors import UsageError
from llmb.input_files import read_text_file
from llmb.runs.folder import cannot_write, write_atomically
from llmb.runs.record_file import BrokenRecord, read_record_file
from llmb.trust import STATE_FOLDER, check_links, check_owner

FOLDER = f"{STATE_FOLDER}/bisect"
DEFAULT_NAME = "bisect"
CANDIDATE, LABEL = "{candidate}", "{label}"
"""In a command, what stands for a candidate and for the label of its runs."""
MOST_LETTERS = 64
"""Letters of a label at most."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_NO_LABEL = re.compile(r"[^A-Za-z0-9._-]+|\.\.+")


class BisectState(Record):
    """The content of the file."""

    schema_version: int = 1
    name: str
    candidates: tuple[str, ...]
    """In order; the first one is known to be as before, the last one as after."""
    workload: str | None = None
    size: str | None = None
    dtype: str | None = None
    scale: int | None = None
    """Scale of the runs; None for whatever the runs with the labels are."""
    good: str | None = None
    """Selects further runs of the first candidate."""
    bad: str | None = None
    """Selects further runs of the last candidate."""
    options: tuple[str, ...] = ()
    """Options of the command that makes a run."""
    skipped: tuple[str, ...] = ()
    run_dirs: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Folders of runs that a command made, by candidate."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of each candidate's runs, in their order, with the candidates' names if labels can hold them."""
        texts = [_NO_LABEL.sub("-", candidate).strip("-.") for candidate in self.candidates]
        fit = len(set(texts)) == len(texts) and all(texts) and len(max(texts, key=len)) < MOST_LETTERS - len(self.name)
        return tuple(f"{self.name}-{text if fit else number}" for number, text in enumerate(texts, start=1))

    def place(self, candidate: str) -> int:
        """Raises UsageError for a name that is not a candidate."""
        if candidate not in self.candidates:
            raise UsageError(f"'{candidate}' is not a candidate", choices=self.candidates)
        return self.candidates.index(candidate)

    def with_skipped(self, candidate: str) -> "BisectState":
        place = self.place(candidate)
        if place in (0, len(self.candidates) - 1):
            do = "start again with another first or last candidate"
            raise UsageError(f"'{candidate}' is one of the two that are compared, and cannot be skipped", do=do)
        return self.model_copy(update={"skipped": tuple(dict.fromkeys((*self.skipped, candidate)))})

    def with_runs(self, candidate: str, folders: tuple[str, ...]) -> "BisectState":
        known = self.run_dirs.get(candidate, ())
        return self.model_copy(update={"run_dirs": {**self.run_dirs, candidate: (*known, *folders)}})


def read_candidates(text: str) -> tuple[str, ...]:
    """Names separated by commas, or those in a file, one a line. Raises UsageError for fewer than two, or a repeat."""
    path = Path(text).expanduser()
    if path.is_file():
        lines = read_text_file(path).decode(errors="replace").splitlines()
        names = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    else:
        names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2:
        do = "give a file with one candidate a line, oldest first, or names separated by commas"
        no_file = "" if path.is_file() or "," in text else "; there is no such file"
        raise UsageError(f"--candidates {text!r} has fewer than two candidates{no_file}", do=do)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"candidates are listed more than once: {', '.join(repeated)}", do="list each once, in order")
    return tuple(names)


def state_path(install: Path, name: str) -> Path:
    """Raises UsageError for a name that no file can have."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name is {name!r}; it must be up to 32 letters, digits, '_' and '-'")
    return install / FOLDER / f"{name}.json"


def read_state(install: Path, name: str) -> BisectState:
    """Raises UsageError if there is none, or if its file is damaged or of another user than this one and the root's."""
    path = state_path(install, name)
    if not path.is_file():
        others = sorted(found.stem for found in path.parent.glob("*.json"))
        do = "'llmb bisect start --candidates A,B,C' begins one"
        raise UsageError(f"there is no bisection '{name}'", where=str(path), choices=others, do=do)
    check_links(path)
    check_owner(path, install)
    try:
        return read_record_file(path, BisectState)
    except BrokenRecord as error:
        do = f"begin again with --fresh: 'llmb bisect start --fresh --name {name} --candidates A,B,C'; runs are kept"
        raise UsageError(f"the bisection '{name}' cannot be resumed: {error.what}", where=error.where, do=do) from error


def write_state(install: Path, state: BisectState) -> None:
    """Raises NotWritable."""
    path = state_path(install, state.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, state.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise cannot_write(path, error) from error
