# SPDX-License-Identifier: Apache-2.0
"""The generated pages of docs/reference, one module per page."""
