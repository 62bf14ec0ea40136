# SPDX-License-Identifier: Apache-2.0
"""Programs by name; each is imported when it is first used."""

from functools import cache
from importlib import import_module

from llmb.errors import unknown
from llmb.programs.port import Program

PROGRAMS = {
    "engine": ("llmb.programs.engine.program", "EngineProgram"),
    "reference_suite": ("llmb.programs.reference_suite.program", "ReferenceSuite"),
    "megatron_bridge": ("llmb.programs.megatron_bridge.program", "MegatronBridge"),
}


@cache
def find_program(name: str) -> Program:
    """Raises UsageError for a name that does not exist."""
    if name not in PROGRAMS:
        raise unknown("program", name, PROGRAMS)
    module, found = PROGRAMS[name]
    program: Program = getattr(import_module(module), found)()
    return program
