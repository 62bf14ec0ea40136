# SPDX-License-Identifier: Apache-2.0
"""Many jobs at once: which ones are meant, the files that name them, and queueing each of them once."""
