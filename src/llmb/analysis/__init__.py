# SPDX-License-Identifier: Apache-2.0
"""Use cases on runs that exist: finding, grouping, judging, comparing, explaining and watching them."""
