# SPDX-License-Identifier: Apache-2.0
"""The generated parts of the documentation: the page of the catalogue, and tables and sample outputs in others."""
