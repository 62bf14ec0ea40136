# SPDX-License-Identifier: Apache-2.0
"""The document on disk: results of an earlier call are reused."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from benchmarks.engine.engines.registry import ENGINES
from benchmarks.engine.records import CaseResult, Document, Settings, Status
from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.base.input_files import read_text_file
from llmb.jobs.locks import file_lock
from llmb.runs.folder import NotWritable, write_atomically

ROOT = Path(__file__).parents[2]
PATIENCE_S = 1


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Within, no other call writes the same document. Raises UsageError if one does, or if it cannot be written."""
    with ExitStack() as held:
        if path is not None:
            try:
                held.enter_context(file_lock(path.with_name(f"{path.name}.lock"), PATIENCE_S, "writing this file"))
            except NotWritable as error:
                raise UsageError(error.what, where=str(path), do="specify another --out") from error
            except EnvironmentProblem as error:
                do = "specify another --out, or wait until the other call ends"
                raise UsageError(error.what, where=str(path), do=do) from error
        yield


def open_document(path: Path | None, settings: Settings, *, fresh: bool, earlier: Path | None = None) -> Document:
    """The document to resume: ``path``, or ``earlier`` where that does not exist yet.

    Raises UsageError if it has results of other settings, or is not a document.
    """
    new = Document(settings=settings, environment={})
    if earlier is not None and not earlier.exists():
        raise UsageError("this file does not exist", where=str(earlier), do="specify the --out of an earlier call")
    if path is None or not path.exists():
        path = earlier
    if path is None or fresh:
        return new
    advice = "specify another --out, or add --fresh to overwrite it"
    try:
        known = Document.model_validate_json(read_text_file(path))
    except ValidationError as error:
        raise UsageError("this file is not a comparison of this version", where=str(path), do=advice) from error
    if differences := list(_differences(known.settings, settings)):
        raise UsageError(
            f"this file holds results of other settings: {', '.join(differences)}", where=str(path), do=advice
        )
    return known


def _differences(known: Settings, new: Settings) -> Iterable[str]:
    before, after = known.model_dump(), new.model_dump()
    return (f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after[name])


def save(document: Document, path: Path | None) -> None:
    """Raises UsageError if it cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, document.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(path)) from error


def with_case(document: Document, result: CaseResult) -> Document:
    """Replaces an earlier result of the same case, but no measurement by the reason why there is no newer one."""
    known = known_result(document, result)
    if known and result.status == "not_run":
        changed = f"{difference(known, result)}; not measured again: {result.reason}"
        result = known.model_copy(update={"outdated": changed})
    others = [case for case in document.cases if case.key != result.key]
    return document.model_copy(update={"cases": (*others, result)})


COMPARED = ("engine_version", "code", "layers", "vocab_size", "gbs", "seq_len")


def known_result(document: Document, case: CaseResult, settled: tuple[Status, ...] = ("done",)) -> CaseResult | None:
    """The result of the same case in an earlier call, whatever the code was."""
    return next((known for known in document.cases if known.key == case.key and known.status in settled), None)


def difference(known: CaseResult, case: CaseResult) -> str | None:
    """What has changed since a result was measured; None if it can be reused."""
    changed = [name for name in COMPARED if getattr(known, name) != getattr(case, name)]
    return ", ".join(f"{name} {getattr(known, name)} -> {getattr(case, name)}" for name in changed) or None


@cache
def code_of(engine: str) -> str:
    """A digest of the code that determines an engine's results, so that a changed engine is measured again."""
    digest = hashlib.sha256()
    for file in code_files(ENGINES[engine].program):
        digest.update(str(file.relative_to(ROOT)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def code_files(program: str | None) -> list[Path]:
    """llmb's sources with the catalogue, or an adapter with the training loop that it uses."""
    if program is None:
        sources = ROOT / "src" / "llmb"
        return sorted([*sources.rglob("*.py"), *sources.rglob("*.yaml")])
    adapter = ROOT / Path(*program.split(".")).with_suffix(".py")
    clock = ROOT / "src" / "llmb" / "engine" / "device.py"
    return [adapter, adapter.with_name("loop.py"), adapter.with_name("job.py"), clock]
