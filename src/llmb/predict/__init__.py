# SPDX-License-Identifier: Apache-2.0
"""What a run will take, from its plan alone. Pure."""
