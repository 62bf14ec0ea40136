# SPDX-License-Identifier: Apache-2.0
"""Describes the launch scripts of the reference suite's releases; checks checkouts, environments and images.

``launch_scripts.yaml`` contains the facts about each script, with their places in the suite's repository.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from llmb.base.errors import UsageError, unknown
from llmb.base.input_files import open_regular
from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record

DATA = Path(__file__).with_name("launch_scripts.yaml")
REPOSITORY = "https://github.com/NVIDIA/dgxc-benchmarking"
LARGEST_BYTES = 1 << 20
CACHES = frozenset({"HF_HOME", "NEMO_HOME"})
"""Variables with the paths of caches, which do not affect measurements."""
TOKEN = "HF_TOKEN"  # noqa: S105 (its name, not a token)
FileState = Literal["as released", "modified", "missing"]


class SourceLine(Record):
    """A line, in a file of the suite, that llmb relies on."""

    file: str
    line: int
    text: str


class Need(Record):
    """A file or folder that must exist before the script runs, as a path template, and how to create it."""

    path: str
    by: str
    same_as: str | None = None
    """The file in the checkout with which the needed file must be identical."""
    commit_of: str | None = None
    """The name, in the script's ``commits``, of the repository that is cloned into the needed folder."""
    repository: str | None = None
    """URL of the repository ``commit_of``."""
    patch: str | None = None
    """The patch in the checkout that is applied to the clone."""
    hub: str | None = None
    """The repository on the Hugging Face hub that contains the needed file under the same name."""
    sha256: str | None = None
    """SHA-256 of the file on the hub."""


class Fixed(Record):
    """Variables that llmb sets in addition if ``option`` is used."""

    option: str
    variables: dict[str, str]
    note: str
    """The resulting difference from the document."""


class LaunchScript(Record):
    """The launch script of a workload's recipes in one release, as llmb uses it."""

    release: str
    tag: str
    commit: str
    workload: str
    sizes: tuple[str, ...]
    gpu_types: tuple[str, ...]
    framework: str
    image: str
    image_file: str
    commits: dict[str, str]
    """Commits of the repositories in the release's environment, by name."""
    installs: tuple[str, ...] = ()
    """Commands, run in the clone of NeMo, that fill the environment; {NAME} is the commit of the repository NAME."""
    queued_by: Literal["script", "scheduler"]
    """``script`` if the script queues the job itself, ``scheduler`` if it is submitted to the scheduler."""
    folder: str
    script: str
    prepares: str | None = None
    """Script in the same folder that prepares dataset and checkpoint."""
    files: dict[str, str]
    """SHA-256 of the script and related files, by path in the checkout."""
    facts: tuple[SourceLine, ...]
    options: dict[str, int]
    """Options that the script passes to the training program, with their line numbers in ``options_file``."""
    options_file: str
    fixes_steps: bool = True
    """True if a profiled, traced or resumed run ignores MAX_STEPS and trains a fixed number of steps."""
    root: Literal["STAGE_PATH", "LLMB_INSTALL"]
    removed: tuple[str, ...] = ()
    """Variables that llmb removes from the script's environment."""
    always: tuple[str, ...]
    """Variables that are set for every launch, as in the document's launch line."""
    fixed: tuple[Fixed, ...] = ()
    gpus_per_node: int | None = None
    """The number of GPUs per node if the script hard-codes it; None if a variable sets it."""
    variables: dict[str, dict[str, int]]
    """The variables that the script reads, with the first line that reads each, by file."""
    unread: tuple[str, ...] = ()
    """Variables of ``always`` in the document's launch line that the script does not read."""
    unused: tuple[str, ...] = ()
    """Variables that the script reads without using them."""
    needs: tuple[Need, ...]
    log_format: Literal["nemo1", "nemo2"]
    logs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.workload} of release {self.release}"

    @property
    def reads(self) -> frozenset[str]:
        """Return the names of the variables that have an effect on the script."""
        return frozenset(name for lines in self.variables.values() for name in lines) - {*self.unused}


class LaunchScriptsFile(Record):
    scripts: tuple[LaunchScript, ...] = Field(min_length=1)


@cache
def launch_scripts() -> tuple[LaunchScript, ...]:
    return read_file(DATA, LaunchScriptsFile).scripts


def scripts_of(release: str) -> tuple[LaunchScript, ...]:
    """Return the scripts of a release; raise UsageError if it is unknown."""
    scripts = tuple(item for item in launch_scripts() if item.release == release)
    if not scripts:
        raise unknown("release", release, dict.fromkeys(item.release for item in launch_scripts()))
    return scripts


def find_launch_script(workload: str, size: str, release: str | None) -> LaunchScript | None:
    """Find the launch script of a recipe in a release; return None if llmb does not know one."""
    matching = (item for item in launch_scripts() if item.workload == workload and size in item.sizes)
    return next((item for item in matching if item.release == release), None)


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A file of a checkout, compared with the release."""

    script: LaunchScript
    file: str
    state: FileState
    differs: tuple[str, ...] = ()
    """Descriptions of changes that affect llmb, if any."""


def check_checkout(checkout: Path, scripts: Iterable[LaunchScript] | None = None) -> list[CheckedFile]:
    """Compare a checkout's files with the files of ``scripts``, by default of the release that it resembles most.

    Without ``scripts``, raise UsageError if the folder contains no file of any release.
    """
    if scripts is not None:
        return [file for script in scripts for file in _check_script(checkout, script)]
    by_tag: dict[str, list[CheckedFile]] = {}
    for script in launch_scripts():
        by_tag.setdefault(script.tag, []).extend(_check_script(checkout, script))
    nearest = max(by_tag.values(), key=_nearness)
    if all(file.state == "missing" for file in nearest):
        tags = ", ".join(by_tag)
        do = f"pass the path of a clone of {REPOSITORY} at one of the tags {tags}"
        raise UsageError("this is not a checkout of the reference suite", where=str(checkout), do=do)
    return nearest


def _nearness(files: list[CheckedFile]) -> tuple[float, float]:
    shares = [sum(item.state == state for item in files) / len(files) for state in ("as released", "modified")]
    return shares[0], shares[1]


def _check_script(checkout: Path, script: LaunchScript) -> Iterator[CheckedFile]:
    for name, digest in script.files.items():
        content = _content(checkout / name)
        if content is None:
            yield CheckedFile(script, name, "missing")
        elif hashlib.sha256(content).hexdigest() == digest:
            yield CheckedFile(script, name, "as released")
        else:
            yield CheckedFile(script, name, "modified", tuple(_differences(script, name, content)))


def _content(path: Path) -> bytes | None:
    try:
        with open_regular(path) as stream:
            return stream.read(LARGEST_BYTES)
    except OSError:
        return None


def _differences(script: LaunchScript, name: str, content: bytes) -> Iterator[str]:
    lines = content.decode(errors="replace").splitlines()
    for fact in script.facts:
        if fact.file == name and fact.text not in map(str.strip, lines):
            actual = lines[fact.line - 1].strip() if fact.line <= len(lines) else "nothing"
            yield f"line {fact.line} was '{fact.text}' and is now '{actual}'"
    text = "\n".join(lines)
    for variable, line in script.variables.get(name, {}).items():
        if variable not in text:
            yield f"{variable} is no longer read (line {line})"
    for option, line in script.options.items() if name == script.options_file else ():
        if option not in text:
            yield f"{option} is no longer passed (line {line})"


def changed_files(checkout: Path, script: LaunchScript) -> list[str]:
    """Describe each file of ``script`` that differs from the release; empty for a checkout of its tag."""
    changed = [item for item in _check_script(checkout, script) if item.state != "as released"]
    return [f"{item.file} is {'; '.join((item.state, *item.differs))}" for item in changed]


def unmet_needs(script: LaunchScript, values: Mapping[str, str]) -> list[str]:
    """Describe the missing files and folders that ``script`` needs, and how to create each."""
    missing = [(need, path) for need in script.needs if not (path := Path(filled_path(need.path, values))).exists()]
    return [f"{path} does not exist: {filled_path(need.by, values)}" for need, path in missing]


def is_met(script: LaunchScript, need: Need, values: Mapping[str, str]) -> bool:
    """Return whether the file or folder that ``need`` describes exists and matches the release."""
    path = Path(filled_path(need.path, values))
    return path.exists() and _problem_of(script, need, path) is None


def changed_needs(script: LaunchScript, values: Mapping[str, str]) -> list[str]:
    """Describe existing files and folders that ``script`` needs but that differ from the release, with remedies."""
    problems = []
    for need in script.needs:
        path = Path(filled_path(need.path, values))
        problem = _problem_of(script, need, path) if path.exists() else None
        if problem:
            problems.append(f"{path} {problem}: {filled_path(need.by, values)}")
    return problems


def _problem_of(script: LaunchScript, need: Need, path: Path) -> str | None:
    if need.same_as and hashlib.sha256(_content(path) or b"").hexdigest() != script.files[need.same_as]:
        return f"is not the release's {need.same_as}"
    if need.sha256 and hashlib.sha256(_content(path) or b"").hexdigest() != need.sha256:
        return f"is not the {path.name} from {need.hub}"
    if need.commit_of:
        head = (_content(path / ".git" / "HEAD") or b"").decode(errors="replace").strip()
        if head != script.commits[need.commit_of]:
            return f"is not at commit {script.commits[need.commit_of]}, but at {head[:60] or 'an unknown one'}"
    return None


NEMO_RUN = "NeMo-Run"
NEMO_RUN_JOB = re.compile(r"^- Job id: (\d{1,20})\s*$", re.M)
"""Matches the job id that NeMo-Run prints (its repository's nemo_run/run/experiment.py, Experiment.status)."""


def has_nemo_run(environment: Path) -> bool:
    return any(environment.glob("lib/python3*/site-packages/nemo_run/__init__.py"))


def nemo_run_commit(environment: Path) -> str | None:
    """Return the commit that pip recorded for NeMo-Run; None if there is no valid record."""
    for record in environment.glob("lib/python3*/site-packages/nemo_run-*.dist-info/direct_url.json"):
        try:
            return str(json.loads(record.read_bytes())["vcs_info"]["commit_id"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


SQUASHFS_MAGIC = b"hsqs"
SQUASHFS_SIZE_AT = 40
"""Offset of the 8-byte field ``bytes_used`` in the superblock (Linux, Documentation/filesystems/squashfs.rst)."""
SUPERBLOCK_BYTES = 96


def image_problem(path: Path) -> str | None:
    """Describe why ``path`` is not a complete squashfs image, as after an interrupted import; None if it is one."""
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            head = stream.read(SUPERBLOCK_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not head.startswith(SQUASHFS_MAGIC) or len(head) < SUPERBLOCK_BYTES:
        return "is not a squashfs image"
    used = int.from_bytes(head[SQUASHFS_SIZE_AT : SQUASHFS_SIZE_AT + 8], "little")
    if used > size:
        return f"is incomplete: it has {size} of {used} bytes"
    return None


def filled_path(template: str, values: Mapping[str, str]) -> str:
    """Replace the names in ``values`` in a path template; other placeholders, such as {job_id}, remain."""
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", value)
    return template
