# SPDX-License-Identifier: Apache-2.0
"""What can be run and what is expected of it: models, hardware, recipes and published figures, as data files."""
