# SPDX-License-Identifier: Apache-2.0
"""Programs that train, convert weights and count a rank's work with torch. Only programs that use torch import them."""
