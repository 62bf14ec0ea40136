# SPDX-License-Identifier: Apache-2.0
"""Splits the name of a GPU kernel into its parts. Pure."""

import re
from typing import NamedTuple

LONGEST = 4096
"""Characters that are parsed; template arguments may be far longer."""
_LENGTH = re.compile(r"\d{1,4}")
_LITERAL = re.compile(r"L[a-z]n?\d+E")
_TYPE = re.compile(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*")
_PLAIN_TYPES = frozenset(
    ("bool", "char", "short", "int", "long", "float", "double", "unsigned", "signed", "const", "true", "false")
)


class KernelName(NamedTuple):
    """``function`` is the kernel's own name, ``namespace`` what precedes it (``a::b``).

    ``argument`` is its first template argument that is a type, without arguments of its own: libraries such as CUTLASS
    have few kernel functions, whose argument says what they compute. Both are empty if there is none.
    """

    function: str
    namespace: str = ""
    argument: str = ""


def split_name(name: str) -> KernelName:
    """The parts of a name as written in the source, demangled or mangled (Itanium C++ ABI)."""
    name = name[:LONGEST]
    return _split_mangled(name) if name.startswith("_Z") else _split_demangled(name)


def _split_demangled(name: str) -> KernelName:
    name = name.replace("(anonymous namespace)", "anonymous").replace("<unnamed>", "anonymous")
    head, arguments = _head(name)
    words = head.split()
    namespace, _, function = (words[-1] if words else name).rpartition("::")
    types = (match[0] for match in _TYPE.finditer(arguments))
    return KernelName(function, namespace, next((text for text in types if text not in _PLAIN_TYPES), ""))


def _head(name: str) -> tuple[str, str]:
    """What precedes the parameters, without template arguments, and those of the last component."""
    kept: list[str] = []
    depth, begin, arguments = 0, 0, ""
    for place, character in enumerate(name):
        if character == "<":
            begin = place + 1 if depth == 0 else begin
            depth += 1
        elif character == ">" and depth:
            depth -= 1
            arguments = name[begin:place]
        elif depth == 0:
            if character == "(":
                break
            kept.append(character)
    return "".join(kept), arguments if depth == 0 else name[begin:]


def _split_mangled(name: str) -> KernelName:
    if name[2:3] != "N":
        length = _LENGTH.match(name, 2)
        return KernelName(name[length.end() : length.end() + int(length[0])] if length else name)
    own, place = _identifiers(name, 3)
    argument, _ = _identifiers(name, place + 1) if name[place : place + 1] == "I" else ([], 0)
    if name.startswith("INS_", place):  # stands for the first namespace
        argument = [*own[:1], *argument]
    return KernelName(own[-1] if own else name, "::".join(own[:-1]), "::".join(argument))


def _identifiers(name: str, place: int) -> tuple[list[str], int]:
    """The components of the next qualified name, and where it ends."""
    found: list[str] = []
    while place < len(name) and not (found and name[place] in "IELv"):
        literal, length = _LITERAL.match(name, place), _LENGTH.match(name, place)
        if literal:
            place = literal.end()
        elif length:
            end = length.end() + int(length[0])
            text = name[length.end() : end]
            found.append("anonymous" if text.startswith("_GLOBAL__N_") else text)
            place = end
        else:
            place += 1
    return found, place
