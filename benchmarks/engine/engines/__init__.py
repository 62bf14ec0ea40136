# SPDX-License-Identifier: Apache-2.0
"""One adapter per engine. Each but llmb's own is a program that trains one job and writes what it measured."""
