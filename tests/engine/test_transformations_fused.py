# SPDX-License-Identifier: Apache-2.0
"""What lies between matrix products is one kernel each once it is compiled; no fp32 copy goes through memory."""

import re

import pytest
import torch
from torch._inductor.utils import get_code
from torch.nn import functional

from llmb.engine.kernels.elementwise import rotate
from llmb.engine.model.attention import rotary_tables
from llmb.engine.model.layers import LayerNorm1P, RMSNorm
from llmb.engine.model.moe import swiglu

pytestmark = [
    pytest.mark.measured,
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # torch's own, when it compiles
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning"),
]
HIDDEN, HEADS = torch.randn(2, 64, 128).bfloat16(), torch.randn(2, 64, 8, 16).bfloat16()


CASES = {
    "RMSNorm": (RMSNorm(128, 1e-5).bfloat16(), HIDDEN),
    "LayerNorm1P": (LayerNorm1P(128, 1e-5).bfloat16(), HIDDEN),
    "residual and norm": (lambda hidden: CASES["RMSNorm"][0](hidden + hidden), HIDDEN),
    "squared ReLU": (lambda hidden: functional.relu(hidden).square(), HIDDEN),
    "SwiGLU": (swiglu, HIDDEN),
}
ROTARY = {"halves": ("llama", False), "interleaved": ("llama", True), "half of each head": ("nemotron4", False)}


def kernels(function, *arguments):
    """Kernels of the generated code, and the operators of torch that it calls beside them."""
    torch.compiler.reset()
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
        code = get_code(torch.compile(function, dynamic=False), *arguments)[0]
    return code.count("cpp_pybinding("), re.findall(r"extern_kernels\.\w+|aten\.\w+\.\w+\(", code)


@pytest.mark.parametrize("name", CASES)
def test_norms_and_activations_are_one_kernel(name):
    function, hidden = CASES[name]
    assert kernels(function, hidden) == (1, [])


@pytest.mark.parametrize("case", ROTARY)
def test_rotation_is_one_kernel(case, models):
    name, interleaved = ROTARY[case]
    model = models[name].model_copy(update={"rotary_pairs": "interleaved" if interleaved else "halves"})
    factors = rotary_tables(model, torch.arange(64)).factors
    assert kernels(lambda heads: rotate(heads, factors), HEADS) == (1, [])
