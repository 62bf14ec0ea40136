# SPDX-License-Identifier: Apache-2.0
"""The stand-in for the interpreter: see ``fork_server``. Arguments: the server's address, the interpreter, its own.

It is started for every rank and command, so it loads what is built into the interpreter and no more.
"""

import _signal
import _socket
import marshal
import posix
import sys

PASSED_ON = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGQUIT, _signal.SIGUSR1)
MODULES = ("llmb.", "benchmarks.")
BETWEEN_S = 0.5


def ask(
    address: str, arguments: list[str], variables: dict[bytes, bytes], files: tuple[int, int, int]
) -> _socket.socket:
    """The connection over which the server tells a process id and, when that process has ended, its exit code."""
    server = _socket.socket(_socket.AF_UNIX)
    server.connect(address)
    said = marshal.dumps((arguments, variables, posix.getcwd()))
    numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
    server.sendmsg([len(said).to_bytes(8, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
    while said:
        said = said[server.send(said) :]
    return server


def is_program(arguments: list[str]) -> bool:
    rest = [argument for argument in arguments if argument not in ("-u", "-P")]
    return bool(rest) and (rest[0].endswith(".py") or (rest[0] == "-m" and rest[1].startswith(MODULES)))


def next_number(server: _socket.socket) -> int:
    """What the server says next; ends this process where its parent has gone."""
    parent = posix.getppid()
    while True:
        try:
            said = server.recv(8)
        except TimeoutError:
            if posix.getppid() == parent:
                continue
            said = b""
        if len(said) < 8:
            posix._exit(1)
        return int.from_bytes(said, "little", signed=True)


def main() -> None:
    address, python, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
    if not is_program(arguments):
        posix.execv(python, [python, *arguments])
    # They wait until it is known whom to pass them on to: what was forked may have said something before.
    _signal.pthread_sigmask(_signal.SIG_BLOCK, PASSED_ON)
    server = ask(address, arguments, dict(posix.environ), (0, 1, 2))
    server.settimeout(BETWEEN_S)
    pid = next_number(server)

    def pass_on(number: int, frame: object) -> None:
        try:
            posix.kill(pid, number)
        except ProcessLookupError:
            return  # it has just ended, and its exit code comes next

    for number in PASSED_ON:
        _signal.signal(number, pass_on)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, PASSED_ON)
    code = next_number(server)
    if code < 0:
        if -code != _signal.SIGKILL:
            _signal.signal(-code, _signal.SIG_DFL)
        posix.kill(posix.getpid(), -code)
    posix._exit(code)


if __name__ == "__main__":
    main()
