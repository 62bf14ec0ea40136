# SPDX-License-Identifier: Apache-2.0
"""Code that uses torch to train, convert weights and count a rank's work. Only programs that need torch import it."""
