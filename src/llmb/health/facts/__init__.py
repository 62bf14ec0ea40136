# SPDX-License-Identifier: Apache-2.0
"""What a node shows of itself: files below a root folder, and what programs print."""
