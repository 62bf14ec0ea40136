# SPDX-License-Identifier: Apache-2.0
"""The definition of a job, for the program that it runs and the scheduler that runs it."""
