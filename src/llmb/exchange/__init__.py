# SPDX-License-Identifier: Apache-2.0
"""Results in the forms of other tools, and runs on their way from one machine to another."""
