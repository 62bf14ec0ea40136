# SPDX-License-Identifier: Apache-2.0
"""Whatever a user writes, a batch script does what it says and nothing else."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slurm_values import folder_of, job_of, order_of, script_of

from llmb.base.errors import UsageError
from llmb.catalogue.resolve import Request
from llmb.launch.jobspec.spec import parse_variables
from llmb.launch.slurm.script import Shell

TINY = Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=2)
PIECES = [
    "$(touch canary)",
    "`touch canary`",
    "; touch canary;",
    "&& touch canary",
    "| touch canary",
    "' touch canary '",
    '" touch canary "',
    "\ntouch canary\n",
    "\r\n#SBATCH --wrap=canary\n",
    "${HOME}",
    "$((1+1))",
    "\\",
    "\\\\'",
    "!!",
    "~",
    "*",
    "{a,b}",
    "<(touch canary)",
    "> canary",
    "#",
    "%j",
    " ",
    "\t",
    "\x00",
    "\x1b[2J",
    "\u2028",
    "é",
    "日本",
    "plain",
    ",",
    "=",
]
hostile = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), min_size=1, max_size=5).map("".join)
STUBS = {
    # What it was called with, one argument a line (none holds a newline), and one variable.
    "srun": '#!/bin/bash\nprintf "%s\\n" "$@" >"$STUB_OUT/srun"\nprintf %s "${HOSTILE-}" >"$STUB_OUT/variable"\n',
    "python": '#!/bin/bash\nprintf "%s\\n" "$@" >"$STUB_OUT/${3##*.}"\n',
    "apptainer": "#!/bin/bash\nexit 0\n",
    "scontrol": "#!/bin/bash\necho NodeName=n1 NodeAddr=10.0.0.1\n",
    "scancel": "#!/bin/bash\nexit 0\n",
}


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for what a batch script calls: none of them does anything but write down its arguments."""
    folder = tmp_path_factory.mktemp("stubs")
    for name, text in STUBS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run_script(script: str, stubs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": f"{stubs}:{os.environ['PATH']}", "STUB_OUT": str(out), "HOME": "/nowhere", "SLURM_JOB_ID": "7"}
    environ |= {"SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    return subprocess.run(
        ["bash"], input=script, env=environ, cwd=out, capture_output=True, text=True, timeout=600, check=False
    )


def directives(script: str) -> list[str]:
    """What sbatch reads: comments up to the first line that is none."""
    head = script.split("\n\n", 1)[0].splitlines()
    assert head[0] == "#!/bin/bash"
    assert all(line.startswith("#") for line in head)
    return [line for line in head if line.startswith("#SBATCH")]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flag=hostile, other=hostile, variable=hostile, image=hostile, module=hostile, name=hostile)
def test_values_come_out_inert_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory,
    stubs: Path,
    flag: str,
    other: str,
    variable: str,
    image: str,
    module: str,
    name: str,
) -> None:
    out = tmp_path_factory.mktemp("out")
    install = out / "root" / name.replace("\0", "0").replace("/", "_").replace(".", "_")
    container = {"runtime": "apptainer", "image": image, "mounts": ["/data"], "python": str(stubs / "python")}
    parts = {
        "flags": {"flags": {"account": flag, "comment": other}},
        "variables": {"variables": {"HOSTILE": variable}},
        "config": {"config": {"container": container, "modules": [module], "slurm": {"partition": flag}}},
        "install": {"install": install},
    }
    for what, part in parts.items():
        try:
            if what == "variables":
                parse_variables([f"HOSTILE={variable}"])
            order = order_of(TINY, **{"config": {"python": str(stubs / "python")}, "install": out / "root", **part})
            script = script_of(order)
        except (UsageError, ValueError) as error:
            assert not isinstance(error, UnicodeError)
            continue
        folder_of(order).path.mkdir(parents=True, exist_ok=True)
        before = set(out.rglob("*"))
        done = run_script(f"module() {{ :; }}\n{script}", stubs, out)
        assert "canary" not in {path.name for path in out.rglob("*")}
        made = {path.name for path in set(out.rglob("*")) - before}
        assert made <= {"srun", "variable", "begin", "finish", "job_end.json", folder_of(order).log.name}, done
        assert done.returncode == 0, (done.stderr, script)
        assert len(directives(script)) == len(job_of(order).flags)
        assert (out / "srun").read_text().splitlines()[-1] == str(folder_of(order).path)
        if what == "variables":
            assert (out / "variable").read_text() == variable
        if what == "config":
            assert image in (out / "srun").read_text().splitlines()


def test_everything_that_prints_arrives_as_it_was_written(tmp_path: Path, stubs: Path) -> None:
    value = "".join(piece for piece in PIECES if piece.isprintable())
    order = order_of(
        TINY,
        variables=parse_variables([f"HOSTILE={value}"]),
        config={"python": str(stubs / "python")},
        install=tmp_path,
    )
    folder_of(order).path.mkdir(parents=True)
    assert run_script(script_of(order), stubs, tmp_path).returncode == 0
    assert (tmp_path / "variable").read_text() == value


@given(text=hostile)
def test_every_word_that_shell_expands_is_a_constant_of_the_code(text: str) -> None:
    """No user's text can be made a shell expression: the type is lost as soon as anything is done with it."""
    assert not isinstance(Shell("a") + text, Shell)
    assert not isinstance(f"{Shell('a')}{text}", Shell)


@pytest.mark.parametrize(
    "name", ["RANK", "MASTER_ADDR", "SLURM_JOB_ID", "UID", "1X", "A-B", "A B", "", "llmb_folder", "BASH_ENV"]
)
def test_variables_that_would_break_the_job_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--env is invalid"):
        parse_variables([f"{name}=x"])
