# SPDX-License-Identifier: Apache-2.0
"""Describes the software of an interpreter; its text is run by that interpreter, which may lack llmb and be older.

Prints a JSON object per line: what is installed at once, then what torch says when it is loaded.
"""

import ctypes
import json
import platform
import sys
from importlib import import_module
from typing import Any

try:
    from importlib.metadata import PackageNotFoundError, distributions, version
except ImportError:
    sys.stdout.write(json.dumps({"python": platform.python_version()}) + "\n")
    sys.exit()


def installed(name: str) -> "str | None":
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def nccl_package() -> "str | None":
    names = {item.metadata["Name"]: item.version for item in distributions()}
    return next((names[name] for name in names if name and name.startswith("nvidia-nccl-cu")), None)


def driver_cuda() -> "str | None":
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def describe_torch() -> "dict[str, Any]":
    try:
        torch = import_module("torch")
    except Exception as error:  # noqa: BLE001 (whatever a damaged installation raises is the result)
        return {"torch_problem": f"{type(error).__name__}: {error}"}
    cuda = torch.version.cuda
    found: dict[str, Any] = {"cuda": cuda, "gpus": 0, "nccl": None, "architectures": [], "capabilities": []}
    if cuda:
        try:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        except Exception as error:  # noqa: BLE001
            found["nccl_problem"] = str(error)
        try:
            found["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
            found["architectures"] = torch.cuda.get_arch_list()
            found["capabilities"] = [
                "".join(map(str, torch.cuda.get_device_capability(gpu))) for gpu in range(found["gpus"])
            ]
        except Exception as error:  # noqa: BLE001
            found["cuda_problem"] = str(error)
    return found


def tell(document: "dict[str, Any]") -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


tell(
    {
        "python": platform.python_version(),
        "llmb": installed("llmb"),
        "torch": installed("torch"),
        "nccl_package": nccl_package(),
        "driver_cuda": driver_cuda(),
    }
)
if installed("torch"):
    tell(describe_torch())
