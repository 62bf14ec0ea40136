# SPDX-License-Identifier: Apache-2.0
"""What every package stands on: errors, missing values, options, files, processes, secrets, statistics."""
