# SPDX-License-Identifier: Apache-2.0
"""Times the parts of a step on this machine's devices."""
