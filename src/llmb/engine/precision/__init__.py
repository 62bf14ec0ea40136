# SPDX-License-Identifier: Apache-2.0
"""Training in FP8. ``docs/explanation/fp8.md`` explains the rules; this diagram shows where each tensor is cast.

With delayed scaling and trained weights (``[ ]`` is a cast by the scale of that tensor)::

    hidden --norm--[input of qkv]--+
             wq, wk, wv --[weight]-+--product--rotation--attention--[input of o]--+
                                                                             wo --[weight]-+--product--+
    hidden --add--------------------------------------------------------------------------------------+
      |
      +--norm--[input of gate_up]--+
            gate, up --[weight]----+--product--activation--[input of down]--+
                                                         down --[weight]----+--product--add--> hidden

    backward: the gradient of each product is cast once, [gradient of the layer], for both of its products.

An activation casts its results as it computes them; every other input is cast separately, as are the results of
activations with current scaling, adapters or biases. The forward pass goes from a block in ``model/decoder`` to
``fp8_layers`` (which layer, which scales, what is saved for the backward pass), ``scaling`` (cast, product),
``kernels/elementwise`` and its Triton files. ``apply`` replaces layers, and sets scales once per step; ``experts``
contains the routed experts.
"""
