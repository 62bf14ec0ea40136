# SPDX-License-Identifier: Apache-2.0
"""The reference suite's own software in an installation: git and pip are real, and find small repositories."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_suite import AS_RELEASED, REPOSITORY, checked_out, write_image

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.cli.config import check
from llmb.launch.documents import launch_scripts as known
from llmb.launch.documents.launch_scripts import find_launch_script, launch_scripts, scripts_of
from llmb.launch.scheduler_lookup import cluster_schema
from llmb.launch.site.cluster_config import read_cluster_config
from llmb.launch.site.site import Site, suite_checkout
from llmb.setup.install.answers import answers_schema
from llmb.setup.install.install_state import read_state
from llmb.setup.install.installation import ImportImage, undo
from llmb.setup.install.installing import Installed, install_all, would_install
from llmb.setup.install.python_environment import Surroundings
from llmb.setup.install.questions import SuiteReleases

CATALOGUE = Catalogue()
LLAMA = ("pretrain_llama3.1", "8b", "25.04")
LORA = ("finetune_llama3", "70b", "25.12")
OLDEST = ("pretrain_llama3.1", "405b", "24.11")
PATCH = """--- a/README.md
+++ b/README.md
@@ -1 +1 @@
-as it was
+patched
"""
# A build that needs no package of an index.
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
BACKEND = """import zipfile


def build_wheel(folder, config_settings=None, metadata_directory=None):
    name, info = "nemo_run-1-py3-none-any.whl", "nemo_run-1.dist-info"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("nemo_run/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: nemo_run\\nVersion: 1\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
# Makes an environment without the seconds that its own pip takes: the pip of the tests fills it.
QUICK_PYTHON = """case "$*" in *venv*) ;; *) exec {python} "$@" ;; esac
for folder; do :; done
{python} -I -m venv --without-pip "$folder"
printf '#!/bin/sh\\nexec {python} -m pip --python "$VIRTUAL_ENV" "$@"\\n' >"$folder/bin/pip"
chmod +x "$folder/bin/pip"
"""
Install = Callable[..., Installed]


def committed(folder: Path, files: dict[str, str], tag: str | None = None) -> str:
    """The commit of ``files`` in a repository that has a later one."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", folder], check=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "1"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    if tag:
        subprocess.run([*git, "tag", tag], check=True)
    subprocess.run([*git, "commit", "-qm", "2", "--allow-empty"], check=True)
    return commit


@pytest.fixture
def hosted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that git takes for GitHub."""
    folder = tmp_path / "hosted"
    redirected(folder.as_uri(), "https://github.com/", monkeypatch)
    for name in ("LLMB_INSTALL", "STAGE_PATH", "SBATCH_ACCOUNT", "SBATCH_PARTITION", "GPU_TYPE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def redirected(to: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"COUNT": "1", "KEY_0": f"url.{to}/.insteadOf", "VALUE_0": address, "GLOBAL": os.devnull}
    for name, value in values.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)


@pytest.fixture
def small(hosted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a release into ``hosted``: its script has the real one's data, but for checksums and commits."""

    def put(*recipe: str) -> None:
        script = find_launch_script(*recipe)
        assert script is not None
        other = {Path(name).name: name for name in script.files}
        texts = {name: f"{name}\n" for name in script.files}
        if patch := other.get("gsw_nemo.patch"):
            texts[patch] = PATCH
        suite = hosted / "NVIDIA" / "dgxc-benchmarking"
        committed(suite, texts, script.tag)
        modules = {"scripts/performance/llm/__init__.py": "", "README.md": "as it was\n"}
        nemo = committed(hosted / nemo_place(script), {**modules, "reinstall.sh": "#!/bin/sh\ntest -d scripts\n"})
        made = committed(hosted / "NVIDIA" / "NeMo-Run.git", {"pyproject.toml": PROJECT, "backend.py": BACKEND})
        changed = {
            "files": {name: hashlib.sha256((suite / name).read_bytes()).hexdigest() for name in script.files},
            "commits": {"NeMo": nemo, "NeMo-Run": made} if script.commits else {},
            "installs": tuple(line for line in script.installs if "reinstall" in line or "nemo_run" in line),
            "facts": (),
        }
        path = tmp_path / "launch_scripts.yaml"
        document = script.model_copy(update=changed).model_dump(mode="json", exclude_none=True)
        path.write_text(yaml.safe_dump({"scripts": [document]}))
        monkeypatch.setattr(known, "DATA", path)
        launch_scripts.cache_clear()

    yield put
    launch_scripts.cache_clear()


def nemo_place(script: known.LaunchScript) -> str:
    found = [need.repository for need in script.needs if need.repository]
    return found[0].removeprefix("https://github.com/") if found else "NVIDIA/NeMo"


def written_image(name: str, folder: Path, runtime: str, architecture: str | None) -> Path:
    """Stands for an import, which needs Enroot."""
    assert (runtime, architecture) == ("pyxis", None)
    path = folder / f"{name.partition('#')[2].replace('/', '+').replace(':', '+')}.sqsh"
    write_image(path)
    return path


@pytest.fixture
def install(tmp_path: Path) -> Install:
    def call(recipe: tuple[str, str, str], importer: ImportImage = written_image, **more: str) -> Installed:
        given = {
            "path": str(tmp_path / "root"),
            "workloads": [recipe[0]],
            "suite_releases": [recipe[2]],
            "scheduler": "slurm",
            "account": "research",
            "gpu_partition": "batch",
            "gpu_type": "h100",
            "gpus_per_node": 8,
            "gpu_request": "gpus-per-node",
            "environment": "existing",
            "python": sys.executable,
            "torch": "none",
            "prepare": "no",
        }
        answers = answers_schema().model_validate({**given, **more})
        return install_all(tmp_path / "root", answers, CATALOGUE, importer, lambda text: None)

    return call


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def settled(script: known.LaunchScript, root: Path, environment: Path) -> None:
    """Settings that name an ``environment``, in which pip recorded NeMo-Run."""
    record = environment / "lib" / "python3.12" / "site-packages" / "nemo_run-1.dist-info" / "direct_url.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"url": "https://x", "vcs_info": {"commit_id": script.commits["NeMo-Run"]}}))
    settings = {"reference_suite": {"environments": {script.workload: str(environment)}}}
    root.mkdir(exist_ok=True)
    (root / "cluster_config.yaml").write_text(yaml.safe_dump(settings))


def states(done: Installed) -> dict[str, str]:
    return {item.name: item.state for item in done.results if item.name not in ("folders", "environment", "scripts")}


def test_a_release_is_installed_once_resumed_after_pip_failed_and_removed(
    small: Callable[..., None], install: Install, hosted: Path, root: Path, program: Callable[[str, str], None]
) -> None:
    small(*LLAMA)
    program("quick-python", QUICK_PYTHON.format(python=sys.executable))
    python = str(shutil.which("quick-python"))
    (script,) = scripts_of("25.04")
    (hosted / "NVIDIA" / "NeMo-Run.git").rename(hosted / "away")
    with pytest.raises(EnvironmentProblem, match=r"environment of suite 25.04: pip install nemo_run") as caught:
        install(LLAMA, python=python)
    environment, nemo = root / "suites" / "environment-25.04", root / "suites" / "v25.04" / "llama3.1" / "NeMo"
    told = next(line for line in str(caught.value.do).splitlines() if " && " in line)
    assert f". {environment}/bin/activate && cd {nemo} && ./reinstall.sh && pip install nemo_run@git+" in told
    (hosted / "away").rename(hosted / "NVIDIA" / "NeMo-Run.git")

    names = ["suite 25.04", "image of suite 25.04", "files of pretrain_llama3.1 25.04", "environment of suite 25.04"]
    assert states(install(LLAMA, python=python)) == {
        "settings": "kept",
        **dict.fromkeys(names, "kept"),
        names[-1]: "done",
    }
    assert set(states(install(LLAMA, python=python)).values()) == {"kept"}
    assert (nemo / "README.md").read_text() == "patched\n"
    assert (nemo / "scripts" / "performance" / "llm" / "llama31_utils.py").read_text() == "llama3.1/llama31_utils.py\n"
    assert known.nemo_run_commit(environment) == script.commits["NeMo-Run"]
    config = read_cluster_config(root, cluster_schema())
    assert config.reference_suite.environments == {"pretrain_llama3.1": str(environment)}
    site = Site(install=root, config=config)
    assert known.changed_files(suite_checkout(site, "v25.04"), script) == []
    values = {"root": str(root), "folder": str(root / "suites" / "v25.04" / "llama3.1")}
    assert [*known.unmet_needs(script, values), *known.changed_needs(script, values)] == []

    moved = root.rename(root.with_name("moved"))
    answers = read_state(moved)
    assert answers is not None
    done = install_all(moved, answers.answers, CATALOGUE, written_image, lambda text: None)
    assert {name for name, state in states(done).items() if state == "done"} == {"settings", names[-1]}
    assert undo(moved, print, results=False).remaining == ()
    assert not moved.exists()


def test_what_cannot_be_fetched_is_told_as_a_command_that_resumes(
    small: Callable[..., None], install: Install, hosted: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(*LORA)
    redirected((hosted / "nowhere").as_uri(), "https://github.com/", monkeypatch)
    with pytest.raises(EnvironmentProblem, match=r"suite 25.12: git clone") as caught:
        install(LORA)
    assert [path.name for path in (root / "suites").iterdir()] == [], "nothing looks like a checkout"
    redirected(hosted.as_uri(), "https://github.com/", monkeypatch)
    by_hand = next(line for line in str(caught.value.do).splitlines() if "git clone" in line)
    subprocess.run(["bash", "-c", by_hand], check=True)
    redirected((hosted / "nowhere").as_uri(), "https://github.com/", monkeypatch)
    with pytest.raises(EnvironmentProblem, match=r"files of finetune_llama3 25.12: git -C") as caught:
        install(LORA)
    redirected(hosted.as_uri(), "https://github.com/", monkeypatch)
    by_hand = next(line for line in str(caught.value.do).splitlines() if "git init" in line)
    subprocess.run(["bash", "-c", by_hand], check=True)
    (script,) = scripts_of("25.12")
    values = {"root": str(root), "folder": str(root / "suites" / "v25.12" / script.folder)}
    assert known.changed_needs(script, values) == []
    undo(root, print, results=False)
    assert (root / "suites" / "v25.12").is_dir(), "its user made it"


def test_a_clone_that_was_killed_is_made_again(
    small: Callable[..., None],
    install: Install,
    program: Callable[[str, str], None],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small(*OLDEST)
    path = os.environ["PATH"]
    program("git", 'for last; do :; done; mkdir -p "$last/llama3.1"; touch "$last/half"; kill -9 $PPID')
    pid = os.fork()
    if pid == 0:
        install(OLDEST)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    assert not (root / "suites" / "v24.11.1").exists()
    assert list((root / "suites").glob(".*/half"))
    monkeypatch.setenv("PATH", path.partition(os.pathsep)[2])
    done = states(install(OLDEST))
    assert done["suite 24.11"] == "done"
    assert "environment of suite 24.11" not in done, "its script is the job"
    assert [item.name for item in (root / "suites").iterdir()] == ["v24.11.1"]
    assert (root / "cfg" / "llama3.1_405b.yaml").read_text() == "llama3.1/llama3.1_405b.yaml\n"
    assert set(states(install(OLDEST)).values()) == {"kept"}


def test_files_that_no_script_of_the_release_makes_are_named_and_compared(
    small: Callable[..., None], root: Path
) -> None:
    small(*OLDEST)
    (script,) = scripts_of("24.11")
    values = {"root": str(root), "folder": str(root / "suites" / "v24.11.1" / "llama3.1")}
    assert sum("hf download openai-community/gpt2" in line for line in known.unmet_needs(script, values)) == 2
    made = root / "llama3.1-dataset" / "merges.txt"
    made.parent.mkdir(parents=True)
    made.write_text("cut")
    (found,) = known.changed_needs(script, values)
    assert found.startswith(f"{made} is not the merges.txt from openai-community/gpt2")


def test_what_the_suites_installer_made_is_taken(
    small: Callable[..., None], install: Install, hosted: Path, root: Path, tmp_path: Path
) -> None:
    small(*LORA)
    (script,) = scripts_of("25.12")
    clone = ["git", "-c", "advice.detachedHead=false", "clone", "-q"]
    subprocess.run([*clone, "-b", script.tag, hosted / "NVIDIA" / "dgxc-benchmarking", root / "llmb_repo"], check=True)
    nemo = root / "workloads" / "finetune_llama3" / "NeMo"
    subprocess.run([*clone, hosted / "NVIDIA-NeMo" / "NeMo", nemo], check=True)
    subprocess.run(["git", "-C", nemo, "checkout", "-qf", script.commits["NeMo"]], check=True)
    write_image(root / "images" / "nvidia+nemo+25.09.00.sqsh")
    settled(script, root, tmp_path / "venv")
    done = states(install(LORA))
    assert {name for name, state in done.items() if state != "kept"} == {"settings"}
    assert not (root / "suites").exists()
    config = read_cluster_config(root, cluster_schema())
    assert config.reference_suite.environments == {"finetune_llama3": str(tmp_path / "venv")}
    undo(root, print, results=False)
    assert nemo.is_dir()


def test_what_others_made_is_not_changed(
    small: Callable[..., None], install: Install, root: Path, tmp_path: Path
) -> None:
    small(*LORA)
    nemo = root / "workloads" / "finetune_llama3" / "NeMo"
    committed(nemo, {"mine": "mine\n"})
    with pytest.raises(EnvironmentProblem, match="this folder is not NeMo at commit"):
        install(LORA)
    assert (nemo / "mine").exists()
    launch = root / "suites" / "v25.12" / "llama3" / "finetune" / "launch.sh"
    launch.write_text("changed\n")
    with pytest.raises(EnvironmentProblem, match=r"(?s)not the suite as released:.*launch.sh is modified") as caught:
        install(LORA)
    assert (caught.value.where, launch.read_text()) == (str(root / "suites" / "v25.12"), "changed\n")

    def half(name: str, folder: Path, runtime: str, architecture: str | None) -> Path:
        write_image(folder / "nvidia+nemo+25.09.00.sqsh", missing_bytes=1)
        return folder

    launch.parents[2].rename(tmp_path / "away")
    (root / "images" / "nvidia+nemo+25.09.00.sqsh").unlink()
    with pytest.raises(EnvironmentProblem, match="the image is incomplete"):
        install(LORA, half)


def test_a_dry_run_lists_the_steps_and_makes_nothing(small: Callable[..., None], root: Path) -> None:
    small(*LLAMA)
    found = {"workloads": ["pretrain_llama3.1"], "suite_releases": "25.04", "gpu_type": "h100", "python": "p"}
    answers = answers_schema().model_validate({**found, "environment": "existing"})
    planned = {item.name: item.text for item in would_install(root, answers, CATALOGUE, written_image).results}
    assert planned["suite 25.04"] == "clone the reference suite at v25.04"
    assert planned["image of suite 25.04"] == "import the image nvcr.io#nvidia/nemo:25.02.01"
    assert planned["files of pretrain_llama3.1 25.04"].startswith("put NeMo, pretrain_llama31.py, llama31_utils.py")
    assert "virtual environment" in planned["environment of suite 25.04"]
    assert not root.exists()


@pytest.mark.parametrize(
    ("scheduler", "release", "problem"),
    [
        ("local", "25.04", "--suite-release: the suite's jobs run on a cluster, but local is this machine alone"),
        ("local", "25.99", "--suite-release: '25.99' is not one of: 24.11, 25.04, 25.07, 25.12"),
    ],
)
def test_a_release_that_cannot_be_installed_is_refused(
    scheduler: str, release: str, problem: str, here: Callable[..., Any]
) -> None:
    with pytest.raises(UsageError) as caught:
        here("-w", "pretrain_llama3.1", "--suite-release", release)
    assert problem in caught.value.what


@AS_RELEASED
def test_every_package_is_that_of_the_release() -> None:
    for script in (item for item in launch_scripts() if item.installs):
        source = f"{script.folder}/setup.sh"
        source = source if source in script.files else f"{script.folder}/metadata.yaml"
        show = ["git", "-C", os.environ[REPOSITORY], "show", f"{script.tag}:{source}"]
        text = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        for line in script.installs:
            wanted = shlex.split(known.filled_path(line, script.commits))[-1].removeprefix("./")
            parts = wanted.replace("@git+", " ").replace("@", " ").split()
            assert "{" not in wanted
            assert all(part in text for part in parts), (script.title, wanted)


@AS_RELEASED
def test_the_real_files_of_a_tag_are_cloned_as_released(
    install: Install, hosted: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(checked_out("v24.11.1", hosted / "NVIDIA" / "dgxc-benchmarking"), {}, "v24.11.1")
    install(OLDEST)
    monkeypatch.setenv("LLMB_INSTALL", str(root))
    check(release="24.11")


@pytest.mark.parametrize(("workload", "gpu_type"), [("finetune_llama3", "h100"), ("pretrain_llama3.1", "b200")])
def test_a_release_without_a_script_for_what_is_installed_is_refused(workload: str, gpu_type: str) -> None:
    given = {"workloads": [workload], "suite_releases": "25.04", "scheduler": "slurm", "gpu_type": gpu_type}
    question = SuiteReleases(answers_schema().model_validate(given), Surroundings(catalogue=CATALOGUE))
    has = "pretrain_llama3.1 on h100; pretrain_nemotron4 on h100"
    assert question.problem("25.04") == f"release 25.04 has {has}, but none of these is installed"
