# SPDX-License-Identifier: Apache-2.0
"""Whole conversions of adapters: to peft's format and back, and merged into their base."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmb import __version__
from llmb.catalogue.records import Lora, Model
from llmb.errors import UsageError
from llmb.huggingface.adapter import ADAPTER_CONFIG, adapter_problems
from llmb.huggingface.folder import read_adapter_config
from llmb.programs.engine.conversion import MergedExport, export_merged, verify_saved
from llmb.programs.engine.converter import check_converter, run_converter
from llmb.runs.checkpoint import (
    RECORD,
    WEIGHTS,
    BaseWeights,
    CheckpointRecord,
    Origin,
    SavedCheckpoint,
    model_differences,
    read_checkpoint,
)
from llmb.runs.conversion import AdapterExportJob, AdapterImportJob, ImportedWeights, MergedAdapters, OnNote
from llmb.runs.folder import write_atomically
from llmb.runs.initial_weights import base_problem, base_text, weights_digest
from llmb.runs.new_folder import check_free, new_folder
from llmb.runs.record import now
