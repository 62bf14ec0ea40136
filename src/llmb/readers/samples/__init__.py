# SPDX-License-Identifier: Apache-2.0
"""Power, clocks, temperature and memory of GPUs and hosts, sampled during a run."""
