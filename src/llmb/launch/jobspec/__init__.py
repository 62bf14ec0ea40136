# SPDX-License-Identifier: Apache-2.0
"""What a job is, for the program that it runs and the scheduler that runs it."""
