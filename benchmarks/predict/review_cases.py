# SPDX-License-Identifier: Apache-2.0
"""Answers of predictions to sixteen cases that an early version got wrong, each with a bound that follows by hand."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.published_layouts import table
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Layout
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.launch.programs.engine.program import count_ranks
from llmb.prediction.memory import settle_sharding
from llmb.prediction.prediction import Prediction, default_calibration, predict, predict_rows, usual_software
from llmb.prediction.sizes import BF16
from llmb.prediction.step_time import TERMS
from llmb.prediction.work import PassWork, RankWork
from llmb.runs.choices import Choices, Parallelism
from llmb.runs.plan import EnginePlan, make_plan
from llmb.runs.rank_account import RankAccount

MAVERICK = "finetune_llama4-maverick"
NONE: Mapping[str, Any] = MappingProxyType({})
USUAL, FULL = Choices(), Choices(parallelism=Parallelism(dp_sharding="full"))
FULL_WITHIN_8 = Choices(parallelism=Parallelism(dp_sharding="full", dp_shard_size=8))
TP, CP, WAIT = TERMS["tp"], TERMS["cp"], TERMS["wait"]
NORMS, SPLIT = TERMS["memory"], TERMS["cp_attention"]
LITTLE = 1.001
"""Factor by which floating-point sums may differ."""
COLUMNS = ("case", "what has to hold", "answer", "holds")


class Case(NamedTuple):
    """A case, its bound, the answer of predictions, and whether it is within the bound."""

    case: str
    bound: str
    answer: str
    holds: bool


class Asked:
    """Plans and predictions of recipes of Llama 3.1, by changes of the layout, of choices and of the GPU."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue

    def plan(
        self,
        size: str,
        gpus: int,
        sizes: Mapping[str, Any] = NONE,
        choices: Choices = USUAL,
        gpu_type: str = "h100",
        workload: str = "pretrain_llama3.1",
    ) -> EnginePlan:
        request = Request(workload=workload, size=size, scale=gpus, gpu_type=gpu_type, overrides=Overrides(**sizes))
        plan = make_plan(resolve(self.catalogue, request), choices, device="cuda", trains=False)
        return settle_sharding(plan, choices.parallelism)

    def predict(self, plan: EnginePlan, figures: Mapping[str, Any] = NONE) -> Prediction:
        gpu = self.catalogue.gpus[plan.recipe.gpu_type].model_copy(update=dict(figures))
        calibration = default_calibration(self.catalogue.rates, usual_software(plan.recipe))
        return predict(plan, gpu, calibration, self.catalogue.rates.errors)


def _of_gpus(asked: Asked) -> Iterator[Case]:
    types = ("h100", "b200", "b300")
    found = {gpu: asked.predict(asked.plan("400b", 256, gpu_type=gpu, workload=MAVERICK)) for gpu in types}
    h100, b200, b300 = (each.seconds for each in found.values())
    low, high = found["b200"].interval_s
    yield Case(
        "1: Maverick 400b on 256 H100, B200, B300",
        "each faster than the previous one; 0.224 s, published for B200, in its interval",
        f"{h100:.3f}, {b200:.3f}, {b300:.3f} s; {low:.3f} to {high:.3f}",
        h100 > b200 > b300 and low <= 0.224 <= high,
    )
    known, unknown = (asked.predict(asked.plan("8b", 8), figures).seconds for figures in (NONE, {"sms": None}))
    yield Case(
        "13: a GPU type with unknown number of SMs, like Blackwell",
        "products in tiles and waves: as long as on 132 SMs",
        f"{unknown:.2f} s; {known:.2f} on 132",
        unknown == known,
    )


def _of_links(asked: Asked) -> Iterator[Case]:
    plan = asked.plan("70b", 64, {"tp": 8, "pp": 1, "vp": 1, "cp": 1})
    for nvlink, least in ((64, 38.1), (32, 76.0)):
        found = asked.predict(plan, {"nvlink_gb_s": nvlink})
        yield Case(
            f"2: 70b on 64 H100, TP 8, NVLink at {nvlink} GB/s",
            f"at least {least} s, the time that its TP messages travel",
            f"{found.seconds:.1f} s, TP {found.terms[TP]:.1f}",
            found.seconds >= least,
        )
    found = asked.predict(plan, {"nvlink_domain_gpus": 1, "gpus_per_node": 1})
    yield Case(
        "3: the same, TP over InfiniBand",
        "at least 25.0 s; wider than ±4 %",
        f"{found.seconds:.1f} s ±{found.error_pct:.0f} %",
        found.seconds >= 25.0 and found.error_pct > 15,
    )
    found = asked.predict(asked.plan("8b", 64, {"cp": 16, "gbs": 64}), {"network_gb_s": 1})
    yield Case(
        "4: 8b on 64, CP 16, 1 GB/s",
        "CP at least 3.9 s: 4.09 travel, attention hides 0.11",
        f"CP {found.terms[CP]:.2f} s",
        found.terms[CP] >= 3.9,
    )
    for title, name in (("NVLink", "nvlink"), ("a network", "network")):
        reached = 1 / asked.catalogue.rates.links[name].value
        yield Case(
            f"14: messages over {title} that nothing hides",
            "NCCL reaches 75 to 90 % of the nominal rate",
            f"{100 * reached:.0f} %",
            0.75 <= reached <= 0.9,
        )


def _of_engine(asked: Asked) -> Iterator[Case]:
    for number, text, plan in (
        (5, "8b on 8, CP 1, GBS 16, ZeRO-3", asked.plan("8b", 8, {"cp": 1, "gbs": 16}, FULL)),
        (7, "tiny on 8, PP 2, VP 2, ZeRO-3", asked.plan("tiny", 8, {"pp": 2, "vp": 2}, FULL)),
        (11, "tiny on 8, TP 2, everything recomputed", asked.plan("tiny", 8, {"tp": 2}, Choices(recompute="full"))),
    ):
        group = "tp" if number == 11 else "dp"
        engine, ours = _engine_bytes(plan, group), predicted_work(plan)[0][group, "all_gather"]
        yield Case(
            f"{number}: {text}",
            f"bytes of {group.upper()} all-gathers as in the engine's step",
            f"{ours / engine:.3f} of them",
            abs(ours / engine - 1) < 0.005,
        )


def _of_sharding(asked: Asked) -> Iterator[Case]:
    whole, part = (asked.predict(asked.plan("8b", 64, {"cp": 1}, choices)) for choices in (FULL, FULL_WITHIN_8))
    yield Case(
        "6: 8b on 64, ZeRO-3 within 8 ranks",
        "shorter than over 64",
        f"{part.seconds:.3f} s, over 64 {whole.seconds:.3f}",
        part.seconds < whole.seconds,
    )


def _of_tensor_parallelism(asked: Asked) -> Iterator[Case]:
    for size, sizes, longer in (("8b", {"tp": 2, "cp": 1}, 0.27), ("70b", {}, 0.5)):
        shared, alone = (
            asked.predict(asked.plan(size, 64, {**sizes, "sequence_parallel": each})) for each in (True, False)
        )
        norms = alone.terms[NORMS] - shared.terms[NORMS]
        yield Case(
            f"8: {size} on 64, TP {shared.plan.recipe.layout.tp} without sequence parallelism",
            f"norms and sums on every rank: {longer} s longer",
            f"{norms:+.2f} s, the step {alone.seconds - shared.seconds:+.2f}",
            abs(norms - longer) < 0.05 and alone.seconds > shared.seconds,
        )


def _of_waits(asked: Asked) -> Iterator[Case]:
    found = asked.predict(asked.plan("8b", 64, {"cp": 1, "gbs": 64}), {"network_gb_s": 1})
    beside, rate = found.terms[TERMS["dp"]], found.calibration.rates["dp"]
    window = found.seconds - found.terms[TERMS["dp_beyond"]] - beside
    yield Case(
        "9: 8b on 64, one micro-batch, 1 GB/s",
        "overlap costs a share of the messages that it hides, not of those that are waited for",
        f"{beside:.2f} s of {window:.2f} s of work",
        beside <= LITTLE * rate * window,
    )
    one, two, eight = (asked.predict(asked.plan("8b", 64, {"cp": cp, "gbs": 64, "seq_len": 65536})) for cp in (1, 2, 8))
    yield Case(
        "12: 8b on 64, 64k tokens, CP 1, 2, 8",
        "the cost of splitting attention was fitted at CP 2 and 8k alone: a wider interval",
        f"{two.seconds - one.seconds:+.2f} and {eight.seconds - one.seconds:+.2f} s; ±{eight.error_pct:.0f} %",
        eight.error_pct > two.error_pct > 1.5 * asked.predict(asked.plan("8b", 64)).error_pct,
    )
    maverick = asked.predict(asked.plan("400b", 256, workload=MAVERICK))
    share = 100 * maverick.terms[WAIT] / maverick.seconds
    yield Case(
        "15: waits for slower ranks in a step of 0.3 s",
        "a share of the step, not 20 % of it",
        f"{share:.1f} %",
        share < 5,
    )


def _of_commands(asked: Asked) -> Iterator[Case]:
    for workload, size, gpus in (("pretrain_mixtral", "8x7b", 64), ("pretrain_qwen3", "8b", 8)):
        row = {"workload": workload, "size": size, "scale": str(gpus), "gpu_type": "h100"}
        (found,) = predict_rows(asked.catalogue, [row])
        of_file = found.outcome.seconds if isinstance(found.outcome, Prediction) else 0.0
        alone = asked.predict(asked.plan(size, gpus, workload=workload)).seconds
        yield Case(
            f"10: {size} on {gpus} by --file", "as without a file", f"{of_file:.3f}, {alone:.3f} s", of_file == alone
        )
    whole, default = (asked.plan("405b", 128, sizes, gpu_type="gb200").recipe for sizes in ({"layers": 126}, NONE))
    yield Case(
        "16: 405b on 128 GB200, with and without --layers 126",
        "no PROXY with all layers; else it is named",
        f"'{whole.proxy_text}', '{default.proxy_text}'",
        not whole.proxy and default.proxy,
    )


QUICK = (_of_gpus, _of_links, _of_sharding, _of_tensor_parallelism, _of_waits, _of_commands)


def cases(catalogue: Catalogue) -> Iterator[Case]:
    asked = Asked(catalogue)
    for part in (*QUICK, _of_engine):
        yield from part(asked)


def _engine_bytes(plan: EnginePlan, group: str) -> float:
    """Return the bytes that rank 0 gathers in a step, as the engine's account counts them."""
    account = count_ranks(plan, [0], lambda _: None).fullest
    assert isinstance(account, RankAccount)
    names = (group, "world") if group == "dp" else (group,)
    return sum(each.bytes for each in account.collectives if each.kind == "all_gather" and each.group in names)


def predicted_work(plan: EnginePlan, stage: int = 0) -> tuple[Counter[tuple[str, str]], float]:
    """Bytes of the messages of a rank in a step, and FLOPs of its products in bf16."""
    work, layout = RankWork(plan, None), plan.recipe.layout
    is_first, is_last = stage == 0, stage == layout.pp - 1
    parts: list[tuple[PassWork, int]] = [
        (each, count) for kind, count in work.stages[stage] for each in work.layer(kind)
    ]
    parts += [(each, 1) for each in work.first() if is_first]
    parts += [(each, 1) for each in work.last() if is_last]
    messages: Counter[tuple[str, str]] = Counter()
    for part, count in parts:
        for message in part.messages:
            messages[message.group, message.kind] += int(count * layout.ga * message.number * message.size)
    for message in work.of_step(stage):
        messages[message.group.removesuffix("_replicas"), message.kind] += int(message.number * message.size)
    if layout.pp > 1:
        passed = work.between_stages()
        # Nothing is sent beyond the first and the last stage.
        number = passed.number - is_first - is_last
        messages["pp", "send"] += int(layout.ga * number * passed.size)
    if plan.lora and is_first and layout.sequence_shards > 1:
        # Adapters need no gradient of the first layer's input, which predictions count all the same.
        messages["tp", "reduce_scatter"] -= int(layout.ga * BF16 * work.sizes.hidden * work.sizes.tokens)
    flops = sum(count * layout.ga * part.flops.get("bf16", 0.0) for part, count in parts)
    return by_ranks(messages, layout), flops


def by_ranks(messages: Counter[tuple[str, str]], layout: Layout) -> Counter[tuple[str, str]]:
    """Join groups that have the same ranks, or whose ranks hold the same kind of parameters."""
    same = {"edp": "dp", "cp": "dp" if layout.dp == 1 else "cp"}
    found: Counter[tuple[str, str]] = Counter()
    for (group, kind), size in messages.items():
        found["experts" if kind == "all_to_all" else same.get(group, group), kind] += size
    return found


def case_rows(catalogue: Catalogue) -> list[list[str]]:
    found = sorted(cases(catalogue), key=lambda each: int(each.case.partition(":")[0]))
    return [[each.case, each.bound, each.answer, "yes" if each.holds else "**no**"] for each in found]


def main() -> None:
    sys.stdout.write(f"{table(COLUMNS, case_rows(Catalogue()))}\n")


if __name__ == "__main__":
    main()
