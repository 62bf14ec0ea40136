# SPDX-License-Identifier: Apache-2.0
"""How ranks share the work: the mesh, and one module per parallelism."""
