# SPDX-License-Identifier: Apache-2.0
"""``llmb archive`` and ``llmb import``: what is packed, what arrives, and what is never accepted."""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import killed_archive_import
import pytest
import zstandard
from called_here import Run
from recorded_runs import gpu_record, times_around
from recorded_runs import write_run as write_gpu_run
from timed_runs import noisy_times, write_run

from llmb.jobs import archive as archive_module
from llmb.jobs.archive import write_archive
from llmb.jobs.history import open_history
from llmb.jobs.imported import import_archive
from llmb.jobs.locks import file_lock
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import SubmittedJob, read_job

SECRET = "hf_" + "Aa0" * 12
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAAB3NzaC1yc2E\n-----END OPENSSH PRIVATE KEY-----\n"
CAMPAIGN = "week-47"


@pytest.fixture
def install(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def folders(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> list[RunFolder]:
    return write_campaign(tmp_path / "root", tiny_plan)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory, tiny_plan: Callable[..., Plan]) -> Path:
    """An archive that is accepted, for those who forge one."""
    place = tmp_path_factory.mktemp("sample")
    written = write_campaign(place, tiny_plan)
    return write_archive([folder.path for folder in written], place / "runs.tar.zst", traces=False).path


def write_campaign(root: Path, tiny_plan: Callable[..., Plan]) -> list[RunFolder]:
    """A campaign of two repeats, one slower run, and one that failed and left secrets in its log."""
    plan = tiny_plan()
    times = [noisy_times(mean_s, 0.002, plan.steps, seed) for seed, mean_s in enumerate((2.0, 2.0, 2.2))]
    labels = ("before", "before", "after")
    found = [write_run(root, plan, own, number=n, label=labels[n]) for n, own in enumerate(times)]
    found.append(write_run(root, plan, [2.0, 2.1], number=3, failed="out of memory"))
    for number, folder in enumerate(found):
        job = SubmittedJob(scheduler="slurm", job_id=str(4711 + number), submitted_at="2026-11-01T12:00:00+00:00")
        folder.job.write_text(job.model_copy(update={"campaign": CAMPAIGN, "key": f"k{number}"}).model_dump_json())
        folder.job_spec.write_text("{}")
        folder.batch_script.write_text("srun")
        folder.resources.mkdir()
        (folder.resources / "node1.jsonl").write_text("{}\n")
        for name in ("checkpoints/step_9", "torch_profile"):
            (folder.path / name).mkdir(parents=True)
            (folder.path / name / "rank0.json.gz").write_bytes(b"large")
    found[3].log.write_text(f"begun\ntoken {SECRET}\npassword: 'correct-horse'\n{KEY}out of memory\n")
    return found


def packed(llmb: Run, *options: str) -> Path:
    done = llmb("archive", *options, "-o", "runs.tar.zst")
    assert done.returncode == 0, done.stderr
    return Path("runs.tar.zst")


@pytest.fixture
def archive(llmb: Run, folders: list[RunFolder], tmp_path: Path) -> Path:
    packed(llmb)
    return tmp_path / "runs.tar.zst"


def content(archive: Path) -> dict[str, bytes]:
    """By the standard programs' format, not by llmb's reader."""
    raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(archive.read_bytes())).read()
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar.getmembers()}


def test_results_and_logs_are_packed_and_nothing_else(llmb: Run, archive: Path, folders: list[RunFolder]) -> None:
    files = content(archive)
    manifest = json.loads(next(iter(files.values())))
    assert next(iter(files)) == "manifest.json" and list(files)[1:] == [one["path"] for one in manifest["files"]]
    for one in manifest["files"]:
        held = files[one["path"]]
        assert (one["size"], one["sha256"]) == (len(held), hashlib.sha256(held).hexdigest())
    names = {name.split("/", 6)[6] for name in list(files)[1:]}
    assert {name for name in names if "/" in name or not name.endswith(".out")} == {
        *("run.json", "metrics.jsonl", "resources/node1.jsonl")
    }
    for run in manifest["runs"]:
        assert (run["campaign"], run["scheduler"]) == (CAMPAIGN, "slurm")
        original = folders[int(run["job_id"]) - 4711]
        assert files[f"{run['folder']}/metrics.jsonl"] == original.steps.read_bytes()
        assert files[f"{run['folder']}/run.json"] == original.record.read_bytes()
    (log,) = (held for name, held in files.items() if b"begun" in held)
    assert log.decode() == "begun\n" + 5 * "[secret]\n" + "out of memory\n"
    for secret in (SECRET, "correct-horse", "AAAAB3NzaC1yc2E"):
        assert all(secret.encode() not in held for held in files.values())


def test_a_reason_that_repeats_a_line_of_a_log_holds_no_secret(
    llmb: Run, tmp_path: Path, tiny_plan: Callable[..., Plan]
) -> None:
    said = 'rank 0 failed: login with "api_key": "open-sesame" refused'
    write_run(tmp_path / "root", tiny_plan(), [2.0, 2.1], failed=said)
    archive = tmp_path / packed(llmb)
    (record,) = (held for name, held in content(archive).items() if name.endswith("run.json"))
    assert b"open-sesame" not in record
    assert json.loads(record)["result"]["reason"] == "[secret]"
    assert llmb("import", "runs.tar.zst", LLMB_INSTALL=str(tmp_path / "there")).returncode == 0


def test_traces_are_packed_if_asked_and_an_existing_file_is_left_alone(
    llmb: Run, folders: list[RunFolder], tmp_path: Path
) -> None:
    packed(llmb, str(folders[0].path), "--traces")
    assert [held for name, held in content(tmp_path / "runs.tar.zst").items() if "torch_profile" in name] == [b"large"]
    again = llmb("archive", "-o", "runs.tar.zst")
    assert again.returncode == 2 and "the file already exists" in again.stderr
    other = llmb("archive", "-o", "runs.zip")
    assert other.returncode == 2 and ".tar.zst" in other.stderr


def test_an_imported_campaign_gives_the_same_verdicts(
    llmb: Run, archive: Path, folders: list[RunFolder], tmp_path: Path
) -> None:
    there = {"LLMB_INSTALL": str(tmp_path / "there")}
    before = llmb("compare", "before", "after", "--json")
    assert before.returncode == 5
    done = llmb("import", str(archive), **there)
    assert (done.returncode, done.stdout) == (0, "4 runs were added\n"), done.stderr
    after = llmb("compare", "before", "after", "--json", **there)
    assert json.loads(after.stdout) == json.loads(before.stdout) and after.returncode == 5
    runs = {
        run["id"]: run for run in json.loads(llmb("runs", "--campaign", CAMPAIGN, "--json", **there).stdout)["runs"]
    }
    assert sorted(run["status"] for run in runs.values()) == ["failed", "success", "success", "success"]
    for folder in folders:
        own = json.loads(llmb("result", str(folder.path), "--json").stdout)
        again = json.loads(llmb("result", own["id"], "--json", **there).stdout)
        assert {**again, "run_dir": own["run_dir"]} == own
        assert (runs[own["id"]]["reason"], runs[own["id"]]["verdict"]) == (own["reason"], verdict_of(own))
    latest = llmb("result", "latest", **there)
    assert latest.returncode == 2 and "all runs here are imported" in latest.stderr, "it means none"
    kept = next(iter(runs))
    shown = llmb("jobs", "show", kept, **there).stdout
    assert "from runs.tar.zst, made at 20" in shown and "there job 471" in shown
    assert json.loads(llmb("jobs", "show", kept, "--json", **there).stdout)["imported"]["scheduler"] == "slurm"
    # A history that is made again from the folders asks no scheduler of the other machine either.
    shutil.rmtree(tmp_path / "there" / ".llmb")
    rebuilt = json.loads(llmb("jobs", "rebuild", "--json", **there).stdout)["jobs"]
    assert {job["scheduler"] for job in rebuilt} == {"local"}
    assert sorted(job["status"] for job in rebuilt) == ["failed", "success", "success", "success"]


def verdict_of(result: dict[str, Any]) -> str | None:
    return result["verdict"] and result["verdict"]["verdict"]


def test_runs_that_are_there_stay_as_they_are(
    llmb: Run, archive: Path, folders: list[RunFolder], tmp_path: Path
) -> None:
    there = {"LLMB_INSTALL": str(tmp_path / "there")}
    assert llmb("import", str(archive), **there).returncode == 0
    first = sorted((tmp_path / "there" / "workloads").rglob("*"))
    again = llmb("import", str(archive), **there)
    assert (again.returncode, again.stdout) == (0, "0 runs were added; 4 were already there\n")
    assert sorted((tmp_path / "there" / "workloads").rglob("*")) == first
    # A run that was removed comes back to its place.
    removed = Path(json.loads(llmb("result", "label:after", "--json", **there).stdout)["run_dir"])
    shutil.rmtree(removed)
    assert llmb("import", str(archive), **there).stdout == "1 run was added; 3 were already there\n"
    assert llmb("result", "label:after", **there).returncode == 0 and removed.exists()
    # Another run in a folder of the same name.
    other = tmp_path / "other" / folders[0].path.relative_to(tmp_path / "root")
    other.mkdir(parents=True)
    (other / "kept").write_text("mine")
    done = json.loads(llmb("import", str(archive), "--json", LLMB_INSTALL=str(tmp_path / "other")).stdout)
    assert len(done["added"]) == 4 and (other / "kept").read_text() == "mine"
    assert [path.name for path in other.iterdir()] == ["kept"]
    job = read_job(RunFolder(Path(done["added"][0])))
    assert job and job.scheduler == "local" and job.campaign == CAMPAIGN


def test_of_two_imports_at_once_one_adds_the_runs(archive: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    place, found = there / "workloads", []
    lock = place / ".import.lock"
    with ThreadPoolExecutor() as threads:
        with file_lock(lock, 1, "importing"):
            waiting = [threads.submit(import_archive, archive, there, found.append) for _ in range(2)]
            end = time.monotonic() + 60
            while len([*place.glob(".import-*/workloads/*/experiments/*/*/*/imported.json")]) < 8:
                assert time.monotonic() < end, "both have unpacked the runs"
                time.sleep(0.01)
            assert not [*place.glob("pretrain_*")], "no run is added meanwhile"
        done = sorted((len(one.result().added), len(one.result().present)) for one in waiting)
    assert done == [(0, 4), (4, 0)]
    assert len([*place.glob("*/experiments/*/*/*/run.json")]) == 4


@pytest.mark.parametrize("form", ["report", "archive"])
def test_a_device_is_not_replaced(llmb: Run, folders: list[RunFolder], tmp_path: Path, form: str) -> None:
    pipe = tmp_path / "pipe.tar.zst"
    os.mkfifo(pipe)
    done = llmb(form, "-o", str(pipe))
    assert done.returncode != 0 and str(pipe) in done.stderr, folders
    assert pipe.is_fifo()


def test_commands_take_an_archive(llmb: Run, archive: Path, folders: list[RunFolder], tmp_path: Path) -> None:
    experiment = tmp_path / "root" / "workloads" / "w" / "experiments" / "e"
    published = write_gpu_run(experiment, gpu_record(), times_around(12.3))
    assert llmb("archive", str(published), "-o", "one.tar.zst").returncode == 0
    empty = {"LLMB_INSTALL": str(tmp_path / "empty")}
    own = json.loads(llmb("judge", str(published), "--json").stdout)["judged"]
    sent = json.loads(llmb("judge", "./one.tar.zst", "--json", **empty).stdout)["judged"]
    assert [one["verdict"] for one in sent] == [one["verdict"] for one in own] and len(own) == 1
    shown = json.loads(llmb("result", "one.tar.zst", "--json", **empty).stdout)
    assert {**shown, "run_dir": str(published)} == json.loads(llmb("result", str(published), "--json").stdout)
    plain = llmb("result", "one.tar.zst", **empty)
    assert plain.returncode == 0 and "jobs show" not in plain.stderr, "it is not in the history"
    several = llmb("result", str(archive), "--json", **empty)
    assert several.returncode == 4 and len(json.loads(several.stdout)["recipes"][0]["runs"]) == 4
    assert llmb("export", str(archive), "-o", "out", "--format", "jsonl", **empty).returncode == 0
    exported = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [run["campaign"] for run in exported] == [CAMPAIGN] * 4
    assert len(json.loads(llmb("compare", "runs.tar.zst", str(folders[2].path), "--json", **empty).stdout)["rows"]) == 1
    assert len(json.loads(llmb("parse", "runs.tar.zst", "--json", **empty).stdout)["results"]) == 4
    assert not (tmp_path / "empty").exists(), "nothing is added"


def test_a_run_is_packed_although_its_job_cannot_be_read(llmb: Run, folders: list[RunFolder], tmp_path: Path) -> None:
    folders[0].job.write_text("")
    archive = tmp_path / packed(llmb)
    assert json.loads(content(archive)["manifest.json"])["runs"][0]["campaign"] is None
    assert len(import_archive(archive, archive.parent / "there", say=print).added) == len(folders)


def tar_of(entries: list[tuple[Any, bytes]]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for entry, held in entries:
            tar.addfile(entry, io.BytesIO(held))
    return raw.getvalue()


def entry_of(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type, entry.linkname = size, kind, link
    return entry


class Forger:
    """Makes archives like one that is accepted, but for one thing."""

    def __init__(self, archive: Path) -> None:
        self.files = content(archive)
        self.manifest = json.loads(self.files.pop("manifest.json"))
        self.record = next(name for name in self.files if name.endswith("run.json"))

    def describe(self, name: str) -> None:
        """The manifest's entry of a file, as whoever forges a file would write it."""
        held = self.files[name]
        own = {"path": name, "size": len(held), "sha256": hashlib.sha256(held).hexdigest()}
        self.manifest["files"] = [*(one for one in self.manifest["files"] if one["path"] != name), own]

    def entries(self) -> list[tuple[tarfile.TarInfo, bytes]]:
        files = {"manifest.json": json.dumps(self.manifest).encode(), **self.files}
        return [(entry_of(name, len(held)), held) for name, held in files.items()]


def traversal(forger: Forger) -> bytes:
    forger.files["workloads/../../../../.bashrc"] = b"rm"
    forger.describe("workloads/../../../../.bashrc")
    return tar_of(forger.entries())


def absolute_path(forger: Forger) -> bytes:
    forger.files["/tmp/hostile"] = b"rm"
    forger.describe("/tmp/hostile")
    return tar_of(forger.entries())


def run_outside(forger: Forger) -> bytes:
    folder = forger.manifest["runs"][0]["folder"]
    text = json.dumps(forger.manifest).replace(folder, "workloads/../experiments/x/x_1/x")
    forger.manifest = json.loads(text)
    forger.files = {
        name.replace(folder, "workloads/../experiments/x/x_1/x"): held for name, held in forger.files.items()
    }
    return tar_of(forger.entries())


def symbolic_link(forger: Forger) -> bytes:
    entries = forger.entries()
    entries[1] = (entry_of(entries[1][0].name, kind=tarfile.SYMTYPE, link="/etc/passwd"), b"")
    return tar_of(entries)


def hard_link(forger: Forger) -> bytes:
    entries = forger.entries()
    entries[2] = (entry_of(entries[2][0].name, kind=tarfile.LNKTYPE, link=entries[1][0].name), b"")
    return tar_of(entries)


def device(forger: Forger) -> bytes:
    return tar_of([*forger.entries(), (entry_of("workloads/null", kind=tarfile.CHRTYPE), b"")])


def pipe(forger: Forger) -> bytes:
    return tar_of([*forger.entries(), (entry_of("workloads/pipe", kind=tarfile.FIFOTYPE), b"")])


def script(forger: Forger) -> bytes:
    name = forger.record.replace("run.json", "job_spec.json")
    forger.files[name] = b'{"work": ["rm"]}'
    forger.describe(name)
    return tar_of(forger.entries())


def tampered(forger: Forger) -> bytes:
    name = forger.record.replace("run.json", "metrics.jsonl")
    forger.files[name] = forger.files[name].replace(b"2.0", b"1.0", 1)
    return tar_of(forger.entries())


def other_size(forger: Forger) -> bytes:
    forger.files[forger.record] += b" " * 100_000
    return tar_of(forger.entries())


def unlisted(forger: Forger) -> bytes:
    return tar_of([*forger.entries(), (entry_of(forger.record.replace("run.json", "breakdown.json"), 1), b"1")])


def repeated(forger: Forger) -> bytes:
    entries = forger.entries()
    return tar_of([*entries, entries[1]])


def without_manifest(forger: Forger) -> bytes:
    return tar_of(forger.entries()[1:])


def manifest_last(forger: Forger) -> bytes:
    first, *entries = forger.entries()
    return tar_of([*entries, first])


def newer_version(forger: Forger) -> bytes:
    forger.manifest["version"] = 2
    return tar_of(forger.entries())


def unknown_key(forger: Forger) -> bytes:
    forger.manifest["execute"] = "rm"
    return tar_of(forger.entries())


def missing_file(forger: Forger) -> bytes:
    return tar_of(forger.entries()[:-1])


def truncated(forger: Forger) -> bytes:
    return tar_of(forger.entries())[:-12_000]


def appended(forger: Forger) -> bytes:
    return tar_of(forger.entries()) + bytes(100_000) + b"more"


def bomb(forger: Forger) -> bytes:
    """A file of zeros that is what the manifest says."""
    name = forger.record.replace("run.json", "metrics.jsonl")
    forger.files[name] = bytes(100 << 20)
    forger.describe(name)
    return tar_of(forger.entries())


def manifest_of_wrong_items(forger: Forger) -> bytes:
    """6 MB, which are packed into 1 KB."""
    text = json.dumps(forger.manifest | {"files": [], "runs": []}).replace('"files": []', '"files": [%s]')
    wrong = (text % ",".join(["{}"] * 2_000_000)).encode()
    return tar_of([(entry_of("manifest.json", len(wrong)), wrong)])


def manifest_of_too_many_items(forger: Forger) -> bytes:
    """In an archive that is large enough for it."""
    text = json.dumps(forger.manifest | {"files": [], "runs": []}).replace('"files": []', '"files": [%s]')
    wrong = (text % ",".join(["{}"] * (1 << 20))).encode()
    held = random.Random(7).randbytes(1 << 16)
    return tar_of([(entry_of("manifest.json", len(wrong)), wrong), (entry_of("noise", len(held)), held)])


def record_of_wrong_items(forger: Forger) -> bytes:
    record = json.loads(forger.files[forger.record]) | {"attempts": [{}] * 200_000}
    forger.files[forger.record] = json.dumps(record).encode()
    forger.describe(forger.record)
    return tar_of(forger.entries())


def large_record(forger: Forger) -> bytes:
    forger.files[forger.record] += b" " * (4 << 20)
    forger.describe(forger.record)
    return tar_of(forger.entries())


def negative_size(forger: Forger) -> bytes:
    forger.manifest["files"][0]["size"] = -1
    return tar_of(forger.entries())


def endless_name(forger: Forger) -> bytes:
    entries = forger.entries()
    return tar_of([entries[0], (entry_of("x" * 100_000, 1), b"1"), *entries[1:]])


def extended_header(forger: Forger) -> bytes:
    """One that ``tarfile`` would take a name from, and read into memory whatever its size."""
    text = b"24 path=/tmp/hostile.txt\n"
    return tar_of([(entry_of("pax", len(text), tarfile.XHDTYPE), text), *forger.entries()])


def other_record(forger: Forger) -> bytes:
    forger.files[forger.record] = forger.files[forger.record].replace(b'"run_id": "', b'"run_id": "00', 1)
    forger.describe(forger.record)
    return tar_of(forger.entries())


def running(forger: Forger) -> bytes:
    """It would be followed, and its processes ended, as a job of this machine."""
    record = json.loads(forger.files[forger.record]) | {"status": "running", "result": None}
    forger.files[forger.record] = json.dumps(record).encode()
    forger.describe(forger.record)
    return tar_of(forger.entries())


def broken_record(forger: Forger) -> bytes:
    forger.files[forger.record] = b"{}"
    forger.describe(forger.record)
    return tar_of(forger.entries())


HOSTILE = {
    traversal: "belongs to no run",
    absolute_path: "belongs to no run",
    run_outside: "a run has an invalid folder",
    symbolic_link: "not a regular file",
    hard_link: "not a regular file",
    device: "not a regular file",
    pipe: "not a regular file",
    script: "belongs to no run",
    tampered: "the checksum of a file differs",
    other_size: "the size of a file differs",
    unlisted: "not in the manifest",
    repeated: "is repeated",
    without_manifest: "does not begin with manifest.json",
    manifest_last: "does not begin with manifest.json",
    newer_version: "reads version 1 only",
    unknown_key: "its manifest is damaged: execute",
    missing_file: "it lacks 1 file listed in its manifest",
    truncated: "truncated",
    appended: "it has data after its end",
    bomb: "the limit for an archive of this size",
    manifest_of_wrong_items: "too large for an archive of this size",
    manifest_of_too_many_items: "more than 1,048,576 values",
    record_of_wrong_items: "damaged: attempts.0.number: Field required",
    large_record: "of JSON; the limit for an archive of this size",
    negative_size: "has a negative size",
    endless_name: "a name that is too long",
    extended_header: "does not begin with manifest.json",
    other_record: "the record belongs to another run",
    running: "a run has not ended",
    broken_record: "damaged",
}


@contextmanager
def unchanged(root: Path) -> Iterator[None]:
    """Nothing is added to a folder, removed from it or changed in it."""

    def state() -> dict[Path, Any]:
        return {path: path.is_file() and path.read_bytes() for path in root.rglob("*")}

    before = state()
    yield
    assert state() == before


@pytest.mark.parametrize("forge", HOSTILE, ids=lambda forge: forge.__name__)
def test_a_hostile_archive_is_refused_and_leaves_nothing(
    forge: Callable[[Forger], bytes], llmb: Run, sample: Path, tmp_path: Path
) -> None:
    forged = tmp_path / "forged.tar.zst"
    forged.write_bytes(zstandard.ZstdCompressor(level=3).compress(forge(Forger(sample))))
    there = tmp_path / "there" / "workloads"
    there.mkdir(parents=True)
    with unchanged(tmp_path):
        done = llmb("import", str(forged), LLMB_INSTALL=str(there.parent))
        judged = llmb("judge", str(forged), LLMB_INSTALL=str(there.parent))
    for refused in (done, judged):
        assert refused.returncode == 2 and HOSTILE[forge] in refused.stderr, refused.stderr
    assert not Path("/tmp/hostile").exists()


def test_an_archive_like_the_forged_ones_is_accepted(llmb: Run, sample: Path, tmp_path: Path) -> None:
    forged = tmp_path / "forged.tar.zst"
    forged.write_bytes(zstandard.ZstdCompressor().compress(tar_of(Forger(sample).entries())))
    assert llmb("import", str(forged), LLMB_INSTALL=str(tmp_path / "there")).returncode == 0


def test_without_zstandard_an_archive_is_compressed_by_the_standard_library(
    llmb: Run, folders: list[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "find_spec", lambda _: None)
    assert "llmb-runs.tar.gz: " in llmb("archive").stdout
    there = str(tmp_path / "there")
    assert llmb("import", "llmb-runs.tar.gz", LLMB_INSTALL=there).returncode == 0
    with tarfile.open(tmp_path / "llmb-runs.tar.gz") as packed:
        assert packed.getnames()[0] == "manifest.json"


def test_what_is_no_archive_is_refused(
    llmb: Run, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.tar.zst").write_text("text")
    assert "not compressed with zstd" in llmb("import", "text.tar.zst").stderr
    damaged = bytearray(sample.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged.tar.zst").write_bytes(damaged)
    assert llmb("import", "damaged.tar.zst", LLMB_INSTALL=str(tmp_path / "there")).returncode == 2
    assert "no such file" in llmb("import", "none.tar.zst").stderr
    monkeypatch.setattr(archive_module, "find_spec", lambda _: None)
    assert "no such file" in llmb("import", "none.tar.zst").stderr
    assert all("needs zstandard" in llmb("import", name).stderr for name in ("damaged.tar.zst", __file__))
    monkeypatch.undo()
    (tmp_path / "text.tar.gz").write_text("text")
    assert "not compressed with gzip" in llmb("import", "text.tar.gz").stderr
    (tmp_path / "cut.tar.gz").write_bytes(gzip.compress(tar_of(Forger(sample).entries()))[:-100])
    assert "damaged or not compressed with gzip" in llmb("import", "cut.tar.gz").stderr
    wide = zstandard.ZstdCompressionParameters(window_log=28)
    raw = tar_of(Forger(sample).entries())
    compressor = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    (tmp_path / "wide.tar.zst").write_bytes(compressor.compress(raw) + compressor.flush())
    assert llmb("import", "wide.tar.zst", LLMB_INSTALL=str(tmp_path / "there")).returncode == 2


def test_an_archive_of_too_many_files_is_refused(
    llmb: Run, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "MOST_FILES", 3)
    done = llmb("import", str(sample), LLMB_INSTALL=str(tmp_path / "there"))
    assert done.returncode == 2 and "files; the limit is 3" in done.stderr


def test_a_full_disk_leaves_no_run(llmb: Run, sample: Path, tmp_path: Path) -> None:
    place = tmp_path / "there"
    place.mkdir()
    (place / "workloads").write_text("a file")
    done = llmb("import", str(sample), LLMB_INSTALL=str(place))
    assert done.returncode == 3 and "cannot write" in done.stderr


WITH_LITTLE_MEMORY = """
import resource, sys
from llmb.__main__ import main
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
sys.exit(main())
"""


@pytest.mark.measured
@pytest.mark.parametrize("forge", [manifest_of_wrong_items, manifest_of_too_many_items, record_of_wrong_items])
def test_wrong_items_take_little_memory(forge: Callable[[Forger], bytes], sample: Path, tmp_path: Path) -> None:
    forged = tmp_path / "forged.tar.zst"
    forged.write_bytes(zstandard.ZstdCompressor(level=19).compress(forge(Forger(sample))))
    environ = os.environ | {"LLMB_INSTALL": str(tmp_path / "there")}
    for words in (["import"], ["judge"], ["compare", str(forged)]):
        command = [sys.executable, "-c", WITH_LITTLE_MEMORY, *words, str(forged)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert (done.returncode, HOSTILE[forge] in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("distance", [17, pytest.param(1, marks=pytest.mark.measured)])
def test_an_import_that_is_killed_adds_each_run_once(sample: Path, tmp_path: Path, distance: int) -> None:
    command = [sys.executable, killed_archive_import.__file__, str(sample), str(tmp_path), str(distance)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told["wanted"]["ids"]) == len({*told["wanted"]["ids"]}) == 4
    assert told["wanted"]["hidden"] == [".import.lock"]
    assert told["changes"] > 40
    assert {number: one for number, one in told["found"].items() if one["after"] != told["wanted"]} == {}
    assert max(one["between"] for one in told["found"].values()) <= 4


def test_what_is_being_imported_is_no_run_yet(llmb: Run, sample: Path, tmp_path: Path) -> None:
    root = tmp_path / "there"
    assert llmb("import", str(sample), LLMB_INSTALL=str(root)).returncode == 0
    whole = tmp_path / "whole"
    shutil.copytree(root / "workloads" / "pretrain_llama3.1", whole)
    for place in (root / "workloads" / ".import-1", root / "workloads" / "pretrain_llama3.1" / "experiments" / ".old"):
        shutil.copytree(whole, place / "workloads" / "pretrain_llama3.1")
    shown = json.loads(llmb("judge", str(root), "--json", LLMB_INSTALL=str(root)).stdout)
    assert ".import-1" not in json.dumps(shown)
    assert ".old" not in json.dumps(shown)
    parsed = llmb("parse", str(root), "--json", LLMB_INSTALL=str(root))
    assert ".import-1" not in parsed.stdout + parsed.stderr


def test_a_run_that_the_history_lacks_is_found_by_its_folder(llmb: Run, sample: Path, tmp_path: Path) -> None:
    root = tmp_path / "there"
    first = json.loads(llmb("import", str(sample), "--json", LLMB_INSTALL=str(root)).stdout)
    with open_history(root, print) as store:
        store.db.execute("DELETE FROM jobs")
    again = json.loads(llmb("import", str(sample), "--json", LLMB_INSTALL=str(root)).stdout)
    assert (again["added"], sorted(again["known"])) == ([], sorted(first["added"]))
    with open_history(root, print) as store:
        assert sorted(job.run_dir for job in store.jobs()) == sorted(first["added"])


def test_two_folders_with_one_id_are_one_run(llmb: Run, sample: Path, tmp_path: Path) -> None:
    forger = Forger(sample)
    run = forger.manifest["runs"][0]
    for name in [name for name in forger.files if name.startswith(run["folder"] + "/")]:
        copied = name.replace(run["folder"], run["folder"] + ".1")
        forger.files[copied] = forger.files[name]
        forger.describe(copied)
    forger.manifest["runs"].insert(1, run | {"folder": run["folder"] + ".1"})
    forged = tmp_path / "forged.tar.zst"
    forged.write_bytes(zstandard.ZstdCompressor().compress(tar_of(forger.entries())))
    done = json.loads(llmb("import", str(forged), "--json", LLMB_INSTALL=str(tmp_path / "there")).stdout)
    assert len(done["added"]) == 4
    assert done["known"] == done["added"][:1]


def test_a_lock_that_is_a_link_is_not_followed(llmb: Run, sample: Path, tmp_path: Path) -> None:
    place = tmp_path / "there" / "workloads"
    place.mkdir(parents=True)
    (place / ".import.lock").symlink_to(tmp_path / "elsewhere")
    done = llmb("import", str(sample), LLMB_INSTALL=str(tmp_path / "there"))
    assert done.returncode == 3
    assert "a lock file must not be a link" in done.stderr
    assert not (tmp_path / "elsewhere").exists()
    assert [path.name for path in place.iterdir()] == [".import.lock"]
