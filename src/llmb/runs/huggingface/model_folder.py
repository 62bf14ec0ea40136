# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model folder on disk: its configuration, the files that hold its weights, and the hub's checksums."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath
from threading import Event
from typing import Any, Literal

from llmb.base.errors import UsageError
from llmb.base.input_files import MOST_JSON_BYTES, check_values, read_regular
from llmb.runs.huggingface.tensors import ADAPTER_CONFIG, CONFIG, INDEX, SINGLE_FILE

AGAIN = "download or save the file again"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class WeightsFolder:
    """Weights of another program: ``files`` below ``path`` contain them, and ``documents`` describe them."""

    format: Literal["huggingface", "nemo"]
    path: Path
    config: Mapping[str, Any]
    files: tuple[str, ...]
    documents: tuple[str, ...]
    context: Path
    """The folder with the tokenizer."""


def read_folder(path: Path) -> WeightsFolder:
    """Read a model folder's configuration and index. Raise UsageError if it is not a complete model in safetensors."""
    if not path.is_dir():
        problem = "it is a file" if path.exists() else "there is no such folder"
        do = f"pass the folder that contains '{CONFIG}'; 'hf download NAME --local-dir FOLDER' downloads one"
        raise UsageError(f"this is not a Hugging Face model: {problem}", where=str(path), do=do)
    if (path / ADAPTER_CONFIG).is_file():  # transformers loads its weights on top of the model's
        what = f"the folder holds an adapter ('{ADAPTER_CONFIG}'), which changes the model"
        merge = "merge it into the weights first (merge_and_unload of peft)"
        do = f"import it with 'llmb checkpoint import --base CHECKPOINT', {merge}, or pass the model's folder"
        raise UsageError(what, where=str(path), do=do)
    files = _weight_files(path)
    if not (path / CONFIG).is_file():
        what, do = f"the folder has no '{CONFIG}', which defines the model", f"copy the model's '{CONFIG}' there"
        raise UsageError(what, where=str(path), do=do)
    documents = tuple(name for name in (CONFIG, INDEX) if (path / name).is_file())
    whole = path.absolute()
    return WeightsFolder("huggingface", whole, read_json(path / CONFIG), files, documents, whole)


def _weight_files(path: Path) -> tuple[str, ...]:
    if (path / INDEX).is_file() and (path / SINGLE_FILE).is_file():
        do = f"move '{INDEX}' elsewhere to read '{SINGLE_FILE}', or '{SINGLE_FILE}' to read the files in the index"
        what = f"the folder has both '{INDEX}' and '{SINGLE_FILE}', and programs differ in which of them they read"
        raise UsageError(what, where=str(path), do=do)
    if (path / INDEX).is_file():
        files = _indexed_files(path / INDEX)
    elif (path / SINGLE_FILE).is_file():
        files = (SINGLE_FILE,)
    else:
        raise _no_weights(path)
    missing = [name for name in files if not (path / name).is_file()]
    if missing:
        lines = "\n".join(f"  - {name} is missing" for name in missing[:10])
        count = f" ({len(missing)} files)" if len(missing) > 10 else ""
        raise UsageError(f"the model is incomplete{count}:\n{lines}", where=str(path), do="download or save it again")
    return files


def _indexed_files(index: Path) -> tuple[str, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError("the index lists no tensors", where=str(index), do="download or save the model again")
    files = tuple(sorted(set(map(str, weight_map.values()))))
    for name in files:
        if PurePath(name).name != name or not name.endswith(".safetensors"):
            what = f"the index lists '{name}', which is not a .safetensors file in the same folder"
            raise UsageError(what, where=str(index), do="download or save the model again")
    return files


def _no_weights(path: Path) -> UsageError:
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    what = f"the folder has no '{INDEX}' or '{SINGLE_FILE}'"
    if not pickles:
        return UsageError(what, where=str(path), do="pass the folder of a complete Hugging Face model")
    what += f", only pickle files ({', '.join(pickles[:3])}), which are unsupported: a pickle can run any code"
    do = "download safetensors files or, if you trust these, convert them with transformers (save_pretrained)"
    return UsageError(what, where=str(path), do=do)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raise UsageError if the file cannot be read, or if it holds something else."""
    try:
        text = read_regular(path, MOST_JSON_BYTES)
        check_values(text)
        content = json.loads(text)
    except (ValueError, OSError, RecursionError) as error:
        why, do = (error.strerror, "check its path and permissions") if isinstance(error, OSError) else (error, AGAIN)
        raise UsageError(f"'{path.name}' cannot be read: {why}", where=str(path), do=do) from error
    if not isinstance(content, dict):
        raise UsageError(f"'{path.name}' does not contain a JSON object", where=str(path), do=AGAIN)
    return content


BLOCK = 2**22
SHA256 = re.compile(r"[0-9a-f]{64}")
LOCAL_METADATA = Path(".cache", "huggingface", "download")
"""Folder of the download records, relative to that of ``hf download --local-dir``."""


def hub_checksums(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the hub's SHA-256 of each file, by name, if the hub's cache or a download record has it."""
    checksums = {name: _linked(folder / name) or _recorded(folder, name) for name in names}
    return {name: checksum for name, checksum in checksums.items() if checksum}


def corrupt_files(folder: Path, checksums: dict[str, str], threads: int, on_block: Callable[[int], None]) -> list[str]:
    """Return files with another checksum than the hub's; call ``on_block`` with each block's size.

    Raise OSError for unreadable files.
    """

    ended = Event()

    def is_corrupt(name: str) -> bool:
        digest = hashlib.sha256()
        for block in _blocks(folder / name):
            if ended.is_set():
                break
            digest.update(block)
            on_block(len(block))
        return digest.hexdigest() != checksums[name]

    with ThreadPoolExecutor(threads, thread_name_prefix="sha256") as pool:
        try:
            return [name for name, corrupt in zip(checksums, pool.map(is_corrupt, checksums), strict=True) if corrupt]
        finally:
            ended.set()  # an interrupted command does not wait for the other files


def _linked(path: Path) -> str | None:
    target = path.resolve()
    is_blob = path.is_symlink() and target.parent.name == "blobs"
    return target.name if is_blob and SHA256.fullmatch(target.name) else None


def _recorded(folder: Path, name: str) -> str | None:
    try:
        _, checksum, downloaded = (folder / LOCAL_METADATA / f"{name}.metadata").read_text().split()
        changed = (folder / name).stat().st_mtime > float(downloaded) + 1
    except (OSError, ValueError):
        return None
    return checksum if SHA256.fullmatch(checksum) and not changed else None


def _blocks(path: Path) -> Iterator[memoryview]:
    block = bytearray(BLOCK)
    with path.open("rb", buffering=0) as stream:
        while size := stream.readinto(block):
            yield memoryview(block)[:size]
