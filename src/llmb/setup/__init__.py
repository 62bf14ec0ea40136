# SPDX-License-Identifier: Apache-2.0
"""What has to be there before a run: an installation, data and checkpoints."""
