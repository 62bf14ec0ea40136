# SPDX-License-Identifier: Apache-2.0
"""What preparation leaves on disk for runs: folders, packed datasets, adapters and weights to start from."""
