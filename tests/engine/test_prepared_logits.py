# SPDX-License-Identifier: Apache-2.0
"""What is prepared for fine-tuning has the logits of transformers on the same weights."""

import warnings

import pytest
import torch
from published_models import write_published
from torch.distributed.checkpoint.state_dict_loader import load

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import find_model
from llmb.checkpoints.prepared_data import prepared_folders
from llmb.engine.checkpoint.load import TensorReader
from llmb.engine.checkpoint.state import MODEL
from llmb.engine.model.decoder import build_model
from llmb.prepare.checkpoint import CheckpointRequest, prepare_checkpoint

MAVERICK = "finetune_llama4-maverick"


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("workload", ["finetune_llama3", pytest.param(MAVERICK, marks=pytest.mark.slow)])
def test_logits_of_prepared_bf16_weights_are_those_of_transformers(workload, tmp_path):
    model = find_model(Catalogue(), workload, "tiny")
    theirs, notes = write_published(model, tmp_path / "source", torch.bfloat16), []
    request = CheckpointRequest(
        workload=workload, size="tiny", source=tmp_path / "source", processes=1, largest_file_bytes=500_000
    )
    folders = prepared_folders(tmp_path, workload)
    prepared = prepare_checkpoint(Catalogue(), request, folders, lambda *_: None, notes.append)
    assert prepared.made
    assert prepared.checkpoint.record.weights_dtypes == ("bf16",)
    assert any(
        "tensors that the model does not have are left out: multi_modal_projector" in note for note in notes
    ) is (workload != "finetune_llama3")
    decoder = build_model(model)
    state = {MODEL + name: parameter.detach() for name, parameter in decoder.named_parameters()}
    with warnings.catch_warnings(action="ignore"):  # torch says that there is one process only
        load(state, storage_reader=TensorReader(prepared.checkpoint.path / "weights"), no_dist=True)
    tokens = torch.randint(0, model.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, decoder(tokens)
    assert float(expected.abs().max()) > 0.1
    assert float((expected - found).abs().max()) < 1e-4
