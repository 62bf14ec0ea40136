# SPDX-License-Identifier: Apache-2.0
"""Compares llmb's engine on one device with other engines that train the same model."""
