# SPDX-License-Identifier: Apache-2.0
"""Code that uses torch to train, convert weights and count a rank's work; programs without torch must not import it."""
