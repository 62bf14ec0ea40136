# SPDX-License-Identifier: Apache-2.0
"""A process that has loaded what ranks and commands need, and becomes them by forking.

Loading takes a rank longer than all the rest of a tiny run. ``ForkServer.python`` is a program that is called like
the interpreter itself: it hands its arguments, variables, folder and open files to the server, lives as long as
what was forked there, passes on signals and ends as that ends. What no program is meant by, such as ``-c``, it
gives to the real interpreter. Where this cannot do: a stopped stand-in stops nobody else, a rank's parent is the
server, and a program's command line is seen at its stand-in.
"""

import atexit
import fcntl
import gc
import importlib
import marshal
import os
import runpy
import select
import selectors
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import fork_client

STAND_IN = Path(__file__).with_name("fork_client.py")
LOCK = "lock"
"""Held by who starts the server or begins to use it, and by the server when it ends."""
COMMANDS = ("run", "submit", "jobs")
LOADED = (
    "llmb.engine.worker",
    "llmb.engine.loop",
    "llmb.engine.parallel.alone",
    "llmb.engine.weights.convert",
    "llmb.engine.weights.weights_export",
    "llmb.launch.ranks",
    "torch._inductor.compile_fx",  # by ranks whose blocks are compiled, with any backend
    *(f"llmb.cli.{name}" for name in COMMANDS),
)
# One thread only: a process with more cannot be forked. Threads that wait spin no longer than in the product's runs.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000"}
READY_S = 600
HELD_BACK = (signal.SIGINT, signal.SIGTERM)
"""They do not end the server; what is forked gets them once it has its own handlers, were they sent before."""


class ForkServer:
    """Ends with the last process that uses it, and so does all that it forked; ``modules`` are loaded, too.

    Those that make one in the same folder, as the processes of pytest-xdist do, have the same one.
    """

    def __init__(self, folder: Path, *modules: str) -> None:
        self.address, self.python = folder / "server", folder / "python"
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self.lifeline = os.open(folder / "lifeline", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # there is none, or nobody reads it
                self.lifeline = self._start(folder, *modules)
        self.pid = int((folder / "pid").read_text())

    def _start(self, folder: Path, *modules: str) -> int:
        for name in ("lifeline", "server"):
            (folder / name).unlink(missing_ok=True)
        client = f'exec "{sys.executable}" -SI "{STAND_IN}" "{self.address}" "{sys.executable}" "$@"\n'
        self.python.write_text(f"#!/bin/sh\n{client}")
        self.python.chmod(0o755)
        os.mkfifo(folder / "lifeline")
        read_end = os.open(folder / "lifeline", os.O_RDONLY | os.O_NONBLOCK)
        lifeline = os.open(folder / "lifeline", os.O_WRONLY)
        ready, its_ready = socket.socketpair()
        with ready, its_ready:
            its_ready.set_inheritable(True)
            command = [sys.executable, __file__, str(self.address), str(self.python), str(its_ready.fileno()), *modules]
            files = [(os.POSIX_SPAWN_DUP2, read_end, 0)]
            pid = os.posix_spawn(sys.executable, command, os.environ | ONE_THREAD, file_actions=files, setsid=True)
            os.close(read_end)
            its_ready.close()
            ready.settimeout(READY_S)
            assert ready.recv(1), "the server that forks ranks did not start"
        (folder / "pid").write_text(str(pid))
        return lifeline

    def stop(self) -> None:
        os.close(self.lifeline)


class Fork:
    """A process that was forked, by its own id; it answers like ``subprocess.Popen``."""

    def __init__(self, server: ForkServer, arguments: list[str], variables: dict[str, str], output: Path) -> None:
        environ = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
        with Path(os.devnull).open() as nothing, output.open("ab") as talk:
            files = (nothing.fileno(), talk.fileno(), talk.fileno())
            self.connection = fork_client.ask(str(server.address), arguments, environ, files)
        self.pid = self._number()
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.connection.settimeout(timeout)
            self.returncode = self._number()
            self.connection.close()
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and the server is about to tell
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        said = self.connection.recv(8)
        assert len(said) == 8, "the server that forks ranks has ended"
        return int.from_bytes(said, "little", signed=True)


class Program(NamedTuple):
    """What a stand-in was called with; ``files`` are its standard input, output and error."""

    arguments: list[str]
    variables: dict[bytes, bytes]
    folder: str
    files: list[int]


@dataclass
class Server:
    """Forks programs, one for each connection, and tells how they ended."""

    listener: socket.socket
    lifeline: int
    """Closed when whoever uses the server is gone."""
    lock: int
    """An open file."""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def serve(self) -> Program:
        """Returns only in a process that was forked, with what it has to become."""
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(self.lifeline, selectors.EVENT_READ, self._abandoned)
        try:
            while True:
                for key, _ in self.selector.select():
                    program = key.data()
                    if program:
                        return program
        finally:
            self.selector.close()

    def _abandoned(self) -> None:
        """Unless somebody has begun to use it meanwhile."""
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        if select.select([self.lifeline], [], [], 0)[0]:
            os._exit(0)
        fcntl.flock(self.lock, fcntl.LOCK_UN)

    def _accept(self) -> Program | None:
        connection, _ = self.listener.accept()
        program = _receive(connection)
        if program is None:
            connection.close()
            return None
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked"
        pid = os.fork()
        if not pid:
            return program
        for file in program.files:
            os.close(file)
        child = Child(self.selector, connection, pid, os.pidfd_open(pid))
        self.selector.register(connection, selectors.EVENT_READ, child.abandoned)
        self.selector.register(child.handle, selectors.EVENT_READ, child.ended)
        _tell(connection, pid)
        return None


class Child(NamedTuple):
    """A process that was forked, and the connection of its stand-in."""

    selector: selectors.BaseSelector
    connection: socket.socket
    pid: int
    handle: int

    def abandoned(self) -> None:
        """Its stand-in is gone, killed most likely."""
        if self.connection.fileno() < 0:
            return  # ``ended`` came first, of what one call of ``select`` found
        self.selector.unregister(self.connection)
        os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self.selector.unregister(self.handle)
        os.close(self.handle)
        _tell(self.connection, os.waitstatus_to_exitcode(status))
        if self.connection in self.selector.get_map():
            self.selector.unregister(self.connection)
        self.connection.close()


def _tell(connection: socket.socket, number: int) -> None:
    try:
        connection.send(number.to_bytes(8, "little", signed=True))
    except OSError:
        return  # it was killed


def _receive(connection: socket.socket) -> Program | None:
    """None where the stand-in ended before it said all."""
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    said = b""
    while len(head) == 8 and len(said) < int.from_bytes(head, "little"):
        part = connection.recv(1 << 20)
        if not part:
            break
        said += part
    if len(head) < 8 or len(said) < int.from_bytes(head, "little"):
        for file in files:
            os.close(file)
        return None
    return Program(*marshal.loads(said), list(files))


def load(*modules: str) -> None:
    for name in (*LOADED, *modules):
        importlib.import_module(name)


def become(program: Program, python: str) -> None:
    """Makes this process what the interpreter would be that was called like this."""
    os.setsid()
    for number, file in enumerate(program.files):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    os.chdir(program.folder)
    os.environ.clear()
    os.environb.update(program.variables)
    tempfile.tempdir = None
    sys.executable = python
    sys.orig_argv = [python, *program.arguments]
    unbuffered = "-u" in program.arguments or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _output(1, at_once=unbuffered)
    sys.stderr = sys.__stderr__ = _output(2, at_once=True, errors="backslashreplace")
    torch: Any = sys.modules["torch"]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))


def _output(number: int, *, at_once: bool, errors: str = "strict") -> Any:
    stream = open(number, "w", buffering=1, closefd=False, errors=errors)  # noqa: SIM115
    if not at_once and not stream.isatty():
        stream.reconfigure(line_buffering=False)
    return stream


def customize() -> None:
    """As the interpreter does before all else, with what PYTHONPATH has for it."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    start = next((file for folder in folders if (file := Path(folder) / "sitecustomize.py").exists()), None)
    if start:
        runpy.run_path(str(start))


def run(arguments: list[str]) -> None:
    """As the interpreter does with the same arguments, which name a module or a script."""
    rest = [argument for argument in arguments if argument not in ("-u", "-P")]
    if rest[0] == "-m":
        sys.argv = rest[1:]
        if "-P" not in arguments:
            sys.path.insert(0, str(Path.cwd()))
        sys.modules.pop(rest[1], None)  # loaded again, and nothing warns that it was loaded before
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")


def leave(code: int) -> NoReturn:
    """As the interpreter does, but for taking apart all that was loaded, which lasts longer than a command itself."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    address, python, ready, *modules = sys.argv[1:]
    sys.path.pop(0)  # what is forked has a folder of its own there
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    load(*modules)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(128)
        os.write(int(ready), b"1")
        os.close(int(ready))
        program = Server(listener, 0, os.open(Path(address).with_name(LOCK), os.O_RDONLY)).serve()
        listener.detach()
    become(program, python)
    customize()
    try:
        run(program.arguments)
    except SystemExit as error:
        if isinstance(error.code, str):
            raise
        leave(error.code or 0)
    leave(0)


if __name__ == "__main__":
    main()
