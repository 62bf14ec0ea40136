# SPDX-License-Identifier: Apache-2.0
"""This machine as a scheduler: a job is a process that runs at once."""
