# SPDX-License-Identifier: Apache-2.0
"""Programs that use torch: they train, convert weights and count a rank's work. No other package imports them."""
