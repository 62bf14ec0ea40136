# SPDX-License-Identifier: Apache-2.0
"""The watchdog: detects hung runs and ends them with the reason."""
