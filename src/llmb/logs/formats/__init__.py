# SPDX-License-Identifier: Apache-2.0
"""The formats of logs, one module each; ``known`` lists them."""
