# SPDX-License-Identifier: Apache-2.0
"""Parallelism: the rendezvous, the device mesh, the kinds of parallelism, and one rank without the others."""
