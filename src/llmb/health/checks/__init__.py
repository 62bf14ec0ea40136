# SPDX-License-Identifier: Apache-2.0
"""Facts of a node to checks, by the rules of ``rules.yaml``. Pure."""
