# SPDX-License-Identifier: Apache-2.0
"""A checkout of the reference suite for tests: the real one at a tag, or scripts of the same form.

What cannot be here is replaced: ``srun`` with a container, which writes the document's log lines instead, the training
program below NeMo, which queues its job with the real NeMo-Run, and more nodes than the test's cluster has.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.launch.documents.launch_scripts import LaunchScript, find_launch_script, launch_scripts

REPOSITORY = "LLMB_SUITE_REPOSITORY"
"""Variable that names a clone of the reference suite, with its tags."""
HOW_TO_GET = f"{REPOSITORY} names no clone of https://github.com/NVIDIA/dgxc-benchmarking"
IS_REQUIRED = "suite" in os.environ.get("LLMB_REQUIRE", "").split(",")
AS_RELEASED = pytest.mark.skipif(not os.environ.get(REPOSITORY) and not IS_REQUIRED, reason=HOW_TO_GET)
"""For tests of the real scripts, before a Slurm is started for them."""

# Of the form of the oldest release: the script is the job.
JOB_SCRIPT = """#!/bin/bash
#SBATCH --exclusive
#SBATCH --ntasks-per-node=8
set -eu -o pipefail
folder=$STAGE_PATH/results/24.11/$DTYPE/$MODEL_SIZE/${SBATCH_GPUS:-$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))}
mkdir -p "$folder"
export SRUN_OUTPUT="$folder/log-nemo_llama3.1_${MODEL_SIZE}_${folder##*/}_%j.out"
mounts="$folder,$STAGE_PATH/llama3.1-dataset:/dataset,$STAGE_PATH/cfg:/cfg"
srun --container-image "$STAGE_PATH/nvidia+nemo+24.09.sqsh" --container-mounts "$mounts" bash -c "python3 -u train.py"
"""
# Of the form of the later ones: it calls a program that queues the job with NeMo-Run.
QUEUEING_SCRIPT = """#!/bin/bash
set -eu -o pipefail
export NEMORUN_HOME={home}
pushd {nemo}
python3 -m scripts.performance.llm.{module} {options}
popd
"""
# Takes the options of each release, and queues a job as it does.
PROGRAM = """import json
import os
import sys

import nemo_run as run


def given(*names):
    found = [value for name, value in zip(sys.argv, sys.argv[1:]) if name in names]
    return found[0] if found else None


with open(os.path.join(os.environ["STAND_IN"], "program.json"), "w") as stream:
    json.dump({"argv": sys.argv[1:], "environ": dict(os.environ)}, stream)
home = given("-l", "--log_dir") or os.environ["NEMORUN_HOME"]
gpus_per_node = int(given("-gn", "--gpus_per_node") or 8)
executor = run.SlurmExecutor(
    account=given("-a", "--account"),
    partition=given("-p", "--partition"),
    tunnel=run.LocalTunnel(job_dir=os.path.join(home, "experiments")),
    nodes=min(2, int(given("-ng", "--num_gpus")) // gpus_per_node),
    ntasks_per_node=gpus_per_node,
    container_image=given("-i", "--container_image"),
    time=given("-t", "--time_limit") or "00:30:00",
    mem="0",
    exclusive=True,
    packager=run.Packager(),
)
name = os.path.splitext(os.path.basename(__file__))[0]
with run.Experiment(name) as experiment:
    experiment.add(run.Script(inline="train"), executor=executor, name=name)
    experiment.run(sequential=True, detach=True)
"""
# In the place of srun with a container: refuses mounts as Pyxis does, and writes what the document's run logs; other
# calls are Slurm's own.
SRUN = r"""#!{python}
import json, os, re, sys, time
words = sys.argv[1:]
if not any(word.startswith("--container-image") for word in words):
    os.execv("{srun}", ["srun", *words])
with open(os.path.join(os.environ["STAND_IN"], "srun.json"), "w") as stream:
    json.dump({{"argv": words, "environ": dict(os.environ)}}, stream)
for mount in ",".join(re.findall(r"--container-mounts[ =](\S+)", " ".join(words))).split(","):
    source = mount.split(":")[0]
    if source and not os.path.exists(source):
        sys.exit(f"slurmstepd: error: pyxis: container start failed: {{source}}: No such file or directory")
output = words[words.index("--output") + 1] if "--output" in words else os.environ["SRUN_OUTPUT"]
with open(output.replace("%j", os.environ["SLURM_JOB_ID"]), "w") as log:
    for line in os.environ["STAND_IN_LINES"].split("|n|"):
        print(line, file=log, flush=True)
    time.sleep(float(os.environ.get("STAND_IN_SLEEP", "0")))
sys.exit(int(os.environ.get("STAND_IN_EXIT", "0")))
"""
# The test's cluster has two nodes: a job of four gets both, and believes in its GPUs.
SBATCH = r"""#!{python}
import json, os, sys
words = sys.argv[1:]
with open(os.path.join(os.environ["STAND_IN"], "sbatch.json"), "w") as stream:
    json.dump({{"argv": words, "environ": dict(os.environ)}}, stream)
if "-N" in words:
    place = words.index("-N") + 1
    gpus = 8 * int(words[place])
    words[place] = str(min(2, int(words[place])))
    words.insert(0, f"--export=ALL,SBATCH_GPUS={{gpus}}")
os.execv("{sbatch}", ["sbatch", *words])
"""


@dataclass(frozen=True)
class SmallSuite:
    """What one launch needs. ``environ`` puts the stand-ins in their places."""

    script: LaunchScript
    checkout: Path
    root: Path
    notes: Path
    """Where stand-ins note with what they were called."""
    environ: dict[str, str]


def checked_out(tag: str, folder: Path) -> Path:
    """The files of the real suite at ``tag`` that llmb knows, below ``folder``."""
    source = os.environ.get(REPOSITORY)
    assert source, HOW_TO_GET
    wanted = {f"{item.folder}/" for item in launch_scripts() if item.tag == tag}
    listed = subprocess.run(["git", "-C", source, "ls-tree", "-r", tag], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        kind, name = line.split("\t")
        if name.startswith(tuple(wanted)) and not name.endswith(".model"):
            content = subprocess.run(["git", "-C", source, "show", f"{tag}:{name}"], capture_output=True, check=True)
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.stdout)
            path.chmod(0o755 if kind.startswith("100755") else 0o644)
    return folder


MODULES = {
    "pretrain_llama3.1": "pretrain_llama31",
    "pretrain_nemotron4": "pretrain_nemotron4_15b",
    "finetune_llama4-maverick": "finetune_llama4_e128",
    "finetune_llama3": "finetune_llama3_70b",
}


def small_suite(
    folder: Path, root: Path, recipe: tuple[str, str, str], path: str, *, real: bool = False, programs: bool = True
) -> SmallSuite:
    """A suite in ``folder`` that is installed in ``root``; ``path`` is the PATH of the cluster's programs.

    ``recipe`` is a workload, a size and a release.
    """
    script = find_launch_script(*recipe)
    assert script is not None
    checkout = checked_out(script.tag, folder / "suite") if real else _written(script, folder / "suite", root)
    install(script, checkout, root)
    notes, stand_ins = folder / "notes", folder / "bin"
    notes.mkdir()
    stand_ins.mkdir()
    for name, text in (("srun", SRUN), ("sbatch", SBATCH)) if programs else ():
        own = next(f"{place}/{name}" for place in path.split(":") if os.access(f"{place}/{name}", os.X_OK))
        (stand_ins / name).write_text(text.format(python=sys.executable, **{name: own}))
        (stand_ins / name).chmod(0o755)
    environ = {
        "PATH": f"{stand_ins}:{path}",
        "STAND_IN": str(notes),
        "HF_TOKEN": "hf_" + "a" * 24,
        "VIRTUAL_ENV": sys.prefix,
        "NEMORUN_HOME": str(root),
    }
    return SmallSuite(script, checkout, root, notes, environ)


def _written(script: LaunchScript, checkout: Path, root: Path) -> Path:
    place = checkout / script.folder
    place.mkdir(parents=True)
    for name in script.files:
        (checkout / name).write_text("")
    if script.queued_by == "scheduler":
        text = JOB_SCRIPT
    else:
        staged = script.root == "STAGE_PATH"
        home = "$STAGE_PATH" if staged else f"$LLMB_INSTALL/workloads/{script.workload}"
        names = ("account", "partition", "num_gpus", "compute_dtype", "container_image")
        values = ("$SBATCH_ACCOUNT", "$SBATCH_PARTITION", "$JOB_TOTAL_GPUS", "$DTYPE", "image.sqsh")
        options = " ".join(f"--{name} {value}" for name, value in zip(names, values, strict=True))
        nemo = "NeMo" if staged else f"{home}/NeMo"
        module = MODULES[script.workload]
        text = QUEUEING_SCRIPT.format(home=home, nemo=nemo, module=module, options=options)
    (place / script.script).write_text(text)
    (place / script.script).chmod(0o755)
    return checkout


def install(script: LaunchScript, checkout: Path, root: Path) -> None:
    """What the suite's own set-up leaves, or llmb's: NeMo, an image, data."""
    image = Path(script.image_file.replace("{root}", str(root)))
    write_image(image)
    if script.queued_by == "scheduler":
        (root / "cfg").mkdir()
        name = "llama3.1/llama3.1_405b.yaml"
        (root / "cfg" / Path(name).name).write_bytes((checkout / name).read_bytes())
        (root / "llama3.1-dataset").mkdir()
        for name in ("vocab.json", "merges.txt"):
            (root / "llama3.1-dataset" / name).touch()
        return
    own = root / "workloads" / script.workload
    nemo = checkout / script.folder / "NeMo" if script.root == "STAGE_PATH" else own / "NeMo"
    (nemo / ".git").mkdir(parents=True)
    (nemo / ".git" / "HEAD").write_text(script.commits["NeMo"] + "\n")
    modules = nemo / "scripts" / "performance" / "llm"
    modules.mkdir(parents=True)
    (modules / f"{MODULES[script.workload]}.py").write_text(PROGRAM)
    (modules / "llama31_utils.py").write_text("")
    if script.root == "LLMB_INSTALL":
        (own / "checkpoint_and_dataset").mkdir()
        source = Catalogue().workloads[script.workload].sources[script.sizes[0]]
        write_nemo_checkpoint(own / "checkpoint_and_dataset" / "models" / source.model)


NEMO_FILES = ("context/model.yaml", "weights/metadata.json", "weights/common.pt", "weights/__0_0.distcp")


def write_nemo_checkpoint(path: Path) -> None:
    """The files of NeMo's import, with some content."""
    for name in NEMO_FILES:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}")


def write_image(path: Path, *, missing_bytes: int = 0) -> None:
    """The superblock of a squashfs image, and ``missing_bytes`` fewer than it says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = 4096
    head = b"hsqs" + bytes(36) + size.to_bytes(8, "little")
    path.write_bytes((head + bytes(size - len(head)))[: size - missing_bytes])


def nemo_lines(step_times_s: list[float], gbs: int = 128, last: int = 49) -> str:
    """Lines of NeMo 2's log, one for each step from 0."""
    return "|n|".join(
        f"Training epoch 0, iteration {step}/{last} | lr: 4.491e-06 | global_batch_size: {gbs} | global_step: {step}"
        f" | reduced_train_loss: {12 - step / 50:.2f} | train_step_timing in s: {time_s}"
        f" | consumed_samples: {gbs * (step + 1)}"
        for step, time_s in enumerate(step_times_s)
    )


def nemo1_lines(step_times_s: list[float], gbs: int = 126, last: int = 49) -> str:
    """Lines of NeMo 1's progress bar."""
    count = last + 1
    return "|n|".join(
        f"Epoch 0: : {100 * (step + 1) // count}%|##| {step + 1}/{count} [16:26<00:00, v_num=gjbq,"
        f" reduced_train_loss={12 - step / 50:.2f}, global_step={step}.0, consumed_samples={gbs * (step + 1)}.0,"
        f" train_step_timing in s={time_s:.2f}]"
        for step, time_s in enumerate(step_times_s)
    )
