# SPDX-License-Identifier: Apache-2.0
"""Describes the software of the interpreter that runs this text, which may lack llmb or be old.

It prints a JSON object per line: the installed versions, then, if torch is installed, the facts that torch reports.
"""

import ctypes
import json
import platform
import sys
from importlib import import_module
from typing import Any


def installed(metadata: Any, name: str) -> "str | None":  # noqa: ANN401 (a module that old interpreters lack)
    try:
        version: str = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    return version


def nccl_package(metadata: Any) -> "str | None":  # noqa: ANN401
    names = {item.metadata["Name"]: item.version for item in metadata.distributions()}
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
    facts: dict[str, Any] = {"cuda": cuda, "gpus": 0, "nccl": None, "architectures": [], "capabilities": []}
    if cuda:
        try:
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        except Exception as error:  # noqa: BLE001
            facts["nccl_problem"] = str(error)
        try:
            facts["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
            facts["architectures"] = torch.cuda.get_arch_list()
            facts["capabilities"] = [
                "".join(map(str, torch.cuda.get_device_capability(gpu))) for gpu in range(facts["gpus"])
            ]
        except Exception as error:  # noqa: BLE001
            facts["cuda_problem"] = str(error)
    return facts


def print_document(document: "dict[str, Any]") -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main() -> None:
    python = {"python": platform.python_version()}
    try:
        metadata = import_module("importlib.metadata")
    except ImportError:
        print_document(python)
        return
    packages = {name: installed(metadata, name) for name in ("llmb", "torch")}
    print_document({**python, **packages, "nccl_package": nccl_package(metadata), "driver_cuda": driver_cuda()})
    if packages["torch"]:
        print_document(describe_torch())


if __name__ == "__main__":
    main()
