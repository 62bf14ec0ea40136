# SPDX-License-Identifier: Apache-2.0
"""One adapter per engine. Each except llmb's is a program that trains one job and writes its measurements."""
