# SPDX-License-Identifier: Apache-2.0
"""Training in FP8. ``docs/explanation/fp8.md`` has the rules; this is where each tensor of a layer is cast.

With delayed scaling, trained weights and compiled blocks (``[ ]`` is a cast by the scale of that tensor)::

    hidden --norm--[input of qkv]--+
             wq, wk, wv --[weight]-+--product--rotation in place--attention--[input of o]--+
                                                                             wo --[weight]-+--product--+
    hidden --add--------------------------------------------------------------------------------------+
      |
      +--norm--[input of gate_up]--+
            gate, up --[weight]----+--product--activation--[input of down]--+
                                                         down --[weight]----+--product--add--> hidden

    backward: the gradient of each product is cast once, [gradient of the layer], for both of its products.

Where there is no norm or activation before a product, its input is cast by itself: current scaling, adapters, tensor
parallelism. The forward pass of a layer goes through six files: from the block in ``model/decoder`` to ``layers``
(which layer, which scales), ``autograd`` (what is saved for the backward pass), ``scaling`` (cast, product), a module
of ``kernels`` (``fp8_cast``, or ``norm`` or ``rotary`` for what is fused) and its Triton file. ``apply`` replaces a
model's layers, ``step`` holds what happens to scales once a step, ``experts`` are the routed experts.
"""
