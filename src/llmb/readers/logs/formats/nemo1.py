# SPDX-License-Identifier: Apache-2.0
"""NeMo 1 (1.20 to 2.0 with PyTorch Lightning's progress bar, ``nemo/utils/exp_manager.py`` and Lightning's
``callbacks/progress/tqdm_progress.py``).

``Epoch 0: : 100%|####| 50/50 [16:26<00:00, v_num=gjbq, reduced_train_loss=11.70, global_step=49.00,
consumed_samples=12600.0, train_step_timing in s=12.80]``: records separated by carriage returns, many in one line, and
repeated. ``global_step``, counted from 0, identifies the step; the time is that of this step alone. Values have three
digits and are padded to five characters, such as ``nan.0``. For ``global_step=1e+3`` the bar's step is used.
"""

import re
import sys
from collections.abc import Iterator

from llmb.readers.logs.formats.format import LINE_ENDS_SOON, NUMBER, Format, find_bad_loss, number_or_none, rank_before
from llmb.readers.logs.step_line import LOAD_HEAD, StepLine

MARK = b"train_step_timing in s="
STEP = re.compile(
    rb"Epoch (?P<epoch>\d{1,9}):[^\r\n\[]{0,600}? (?P<done>\d{1,9})(?:/(?P<total>\d{1,9})|it) \["
    rb"(?P<body>[^\r\n\]]{0,1500}?, train_step_timing in s=(?P<time>%s)[^\r\n\]]{0,500}+)\]" % NUMBER + LINE_ENDS_SOON
)
_STEP_NUMBER = re.compile(rb", global_step=(\d{1,9})(?:\.0{0,9})?[,\]]")
_SAMPLES = re.compile(rb", consumed_samples=(\d{1,15})(?:\.0{0,9})?(?:,|$)")
_PADDED = rb"=(%s)(?:\.0?)?(?:,|$)" % NUMBER
_LOSS = re.compile(rb", (?:reduced_train_loss|loss)" + _PADDED)
_GRAD_NORM = re.compile(rb", grad_norm" + _PADDED)
_TFLOPS = re.compile(rb", TFLOPS_per_GPU" + _PADDED)
_BEGUN = re.compile(rb"Epoch \d{1,9}:[^\r\n\[]{0,600}? \d{1,9}/\d{1,9} \[")


class Nemo1Reader:
    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        for match in STEP.finditer(text, start, end):
            yield _read(match, rank_before(text, match.start(), start))

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        steps = list(self.find(text))
        rest = text[text.rfind(b"]") + 1 :]
        return steps, _BEGUN.search(rest) is not None


def _read(match: "re.Match[bytes]", rank: int | None) -> StepLine:
    body, epoch, done, total = match["body"], int(match["epoch"]), int(match["done"]), match["total"]
    number = _STEP_NUMBER.search(match[0])
    before = epoch * int(total or 0)
    step = int(number[1]) if number else max(0, before + done - 1)
    # The bar counts the iterations of an epoch, of which there may be several, or of the run.
    last = 0 if total is None else int(total) - 1 + (before if step >= before else 0)
    loss, grad_norm, tflops, samples = (one.search(body) for one in (_LOSS, _GRAD_NORM, _TFLOPS, _SAMPLES))
    bad = find_bad_loss(body)
    return StepLine(
        step=step,
        last=max(step, last),
        step_time_s=float(match["time"]),
        loss=number_or_none(loss and loss[1]) if bad is None else bad,
        tflops_per_gpu=number_or_none(tflops and tflops[1]),
        grad_norm=number_or_none(grad_norm and grad_norm[1]),
        rank=rank,
        samples=int(samples[1]) if samples else None,
    )


FORMAT = Format(
    name="nemo1",
    title="NeMo 1",
    marks=(MARK, b"Restoring states from ", LOAD_HEAD),
    step=STEP,
    reader=Nemo1Reader,
    resumed=re.compile(rb"Restoring states from the checkpoint path at |" + LOAD_HEAD),
)
