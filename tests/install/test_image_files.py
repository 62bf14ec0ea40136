# SPDX-License-Identifier: Apache-2.0
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from llmb.errors import LlmbError, UsageError
from llmb.install.images import (
    ImageRequest,
    RegistryImage,
    explained,
    image_name,
    image_source,
    import_image,
    read_checksum,
    sha256_of,
    source_problem,
    tool_command,
)

NEMO = "nvcr.io#nvidia/nemo:26.04.01"
DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("text", "name", "enroot", "apptainer"),
    [
        ("nvcr.io/nvidia/nemo:26.04.01", "nvidia+nemo+26.04.01", NEMO, "nvcr.io/nvidia/nemo:26.04.01"),
        (f"docker://{NEMO}", "nvidia+nemo+26.04.01", NEMO, "nvcr.io/nvidia/nemo:26.04.01"),
        ("docker://$oauthtoken@nvcr.io#a/b:25.09", "a+b+25.09", "$oauthtoken@nvcr.io#a/b:25.09", "nvcr.io/a/b:25.09"),
        ("docker://python", "python+latest", "python:latest", "python:latest"),
        ("nvidia/cuda:13", "nvidia+cuda+13", "nvidia/cuda:13", "nvidia/cuda:13"),
        ("localhost:5000/a/b:1", "a+b+1", "localhost:5000#a/b:1", "localhost:5000/a/b:1"),
        ("dockerd://llmb:0.1", "llmb+0.1", "dockerd://llmb:0.1", "docker-daemon://llmb:0.1"),
        ("dockerd://a.io/b:1", "a.io+b+1", "dockerd://a.io/b:1", "docker-daemon://a.io/b:1"),
        (f"a.io/b@sha256:{DIGEST}", f"b+sha256-{DIGEST}", f"a.io#b:sha256:{DIGEST}", f"a.io/b@sha256:{DIGEST}"),
    ],
)
def test_names_of_an_image(text: str, name: str, enroot: str, apptainer: str) -> None:
    """What a program gets begins with docker:// unless another scheme is given here."""
    source = image_source(text)
    assert isinstance(source, RegistryImage)
    assert image_name(source, "pyxis") == f"{name}.sqsh"
    assert image_name(source, "apptainer") == f"{name}.sif"
    expected = [found if "://" in found else f"docker://{found}" for found in (enroot, apptainer)]
    assert [source.for_enroot, source.for_apptainer] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("docker://me:geheim@nvcr.io#nvidia/nemo:1", "password"),
        ("oras://ghcr.io/a/b:1", "unknown source of images 'oras://'"),
        ("docker://nvcr.io/nvidia/nemo:", "names no image"),
        ("a b", "names no image"),
        ("", "names no image"),
        ("x:1 --output /etc/passwd", "names no image"),
    ],
)
def test_what_names_no_image(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        image_source(text)
    assert "geheim" not in caught.value.text()


def test_a_wrong_image_is_a_wrong_answer(tmp_path: Path) -> None:
    (tmp_path / "a.sqsh").touch()
    assert source_problem(str(tmp_path / "a.sqsh")) is None
    assert source_problem("nvcr.io/nvidia/nemo:1") is None
    assert source_problem("/nonexistent/a.sqsh") == "there is no file /nonexistent/a.sqsh"
    assert "password" in str(source_problem("docker://me:geheim@nvcr.io#a:1"))


def test_a_path_is_a_file() -> None:
    assert image_source("/shared/a.sqsh") == Path("/shared/a.sqsh")
    assert image_source("a.tar") == Path.cwd() / "a.tar"
    assert image_name(Path("/shared/llmb.tar"), "apptainer") == "llmb.sif"


def test_kinds_of_archives(tmp_path: Path) -> None:
    for member, kind in (("./oci-layout", "oci-archive"), ("manifest.json", "docker-archive")):
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            archive.addfile(tarfile.TarInfo(member), io.BytesIO())
        request = ImageRequest(source="unused", folder=tmp_path, runtime="apptainer")
        assert tool_command(tmp_path / "a.tar", tmp_path / "a.sif", request)[-1] == f"{kind}:{tmp_path / 'a.tar'}"
    (tmp_path / "a.tar").write_text("no image")
    with pytest.raises(UsageError, match="does not start such a file"):
        import_image(ImageRequest(source=str(tmp_path / "a.tar"), folder=tmp_path, runtime="apptainer"), print)


def test_sha256sum_reads_the_checksum_beside_an_image(tmp_path: Path) -> None:
    image = tmp_path / "nvidia+nemo+1.sqsh"
    image.write_bytes(b"image")
    checksum = tmp_path / "nvidia+nemo+1.sqsh.sha256"
    import_image(ImageRequest(source="nvidia/nemo:1", folder=tmp_path, runtime="pyxis"), print)
    assert read_checksum(image) == sha256_of(image)
    subprocess.run(["sha256sum", "--check", checksum.name], cwd=tmp_path, check=True, capture_output=True)
    for damaged in ("", "0" * 64, f"{'0' * 64}  other.sqsh\n"):
        checksum.write_text(damaged)
        assert read_checksum(image) is None


@pytest.mark.parametrize(
    ("program", "text", "words", "exit_code"),
    [
        ("enroot", "[ERROR] URL https://nvcr.io/v2/x returned error code: 401 Unauthorized", ".credentials", 3),
        ("apptainer", "FATAL: While making image: unauthorized: authentication required", "registry login", 3),
        ("enroot", "zstd: error 70 : Write error : No space left on device", "ENROOT_CACHE_PATH and ENROOT_TEMP", 3),
        ("enroot", "[ERROR] URL https://nvcr.io/v2/x returned error code: 404 Not Found", "the tag", 3),
        ("enroot", "curl: (6) Could not resolve host: nvcr.io", "login node", 7),
        ("enroot", "[ERROR] Command not found: jq", "that program", 3),
        ("apptainer", "toomanyrequests: You have reached your pull rate limit", "retry later", 7),
        ("enroot", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock", "docker", 3),
    ],
)
def test_what_tools_say_is_explained(program: str, text: str, words: str, exit_code: int) -> None:
    error = explained(program, 1, f"[INFO] Querying\r\n\x1b[31m{text}\x1b[0m\n")
    assert error.exit_code == exit_code
    assert words in (error.do or "")
    assert text in error.what
    assert "\x1b" not in error.text()


def test_what_is_not_known_is_shown_as_it_is() -> None:
    error: LlmbError = explained("enroot", -9, "odd\n" * 30)
    assert error.exit_code == 4
    assert error.what == "enroot was killed by signal 9" + "\n  | odd" * 4
