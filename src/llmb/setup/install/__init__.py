# SPDX-License-Identifier: Apache-2.0
"""Installs llmb: environment, images, folders and preparations. An installation can be repeated and resumed."""
