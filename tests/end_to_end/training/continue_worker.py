# SPDX-License-Identifier: Apache-2.0
"""One rank that goes on from each of several checkpoints, one after the other, and writes down the losses.

Arguments: a file with the plans (JSON), the file for the losses. The ranks are told by torch's variables.
"""

import json
import os
import sys
from pathlib import Path

from llmb.engine.checkpoint.load import load_checkpoint
from llmb.engine.data.batches import rank_data
from llmb.engine.data.build import build_data
from llmb.engine.loop import do_step
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel.mesh import join_ranks, leave_ranks
from llmb.engine.parallel.pipeline import build_passes
from llmb.engine.stages import prepare_stages
from llmb.engine.timing import ExpertLoadCounter, LayerTimes, StepReader
from llmb.runs.plan import EnginePlan

plans = [EnginePlan(**fields) for fields in json.loads(Path(sys.argv[1]).read_text())]
ranks = join_ranks(plans[0])
losses = []
for plan in plans:
    recipe = plan.recipe
    source = rank_data(build_data(plan), plan, ranks, varlen=False)
    stages = prepare_stages(plan, ranks)
    models = [stage.model for stage in stages]
    optimizers = [build_optimizer(stage, recipe.training) for stage in stages]
    load_checkpoint(Path(plan.start.path), stages, optimizers, ranks)
    passes = build_passes(stages, plan, ranks)
    numbers = range(plan.first_step, plan.last_step + 1)
    reader = StepReader(plan, ranks, ExpertLoadCounter(models, ranks), LayerTimes(models, ranks.device))
    for number in numbers:
        reader.begin(number, saving=False)
        reader.end(*do_step(number, plan, passes, optimizers, source, ranks))
    losses.append([step.loss for step, *_ in reader.read(all_steps=True)])
if ranks.is_first:
    Path(sys.argv[2]).write_text(json.dumps(losses))
leave_ranks()
os._exit(0)  # gloo's threads may abort an interpreter that ends by itself
