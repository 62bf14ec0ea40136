# SPDX-License-Identifier: Apache-2.0
"""Creates a root of installation: environment, images, folders, preparations. It can be repeated and resumed."""
