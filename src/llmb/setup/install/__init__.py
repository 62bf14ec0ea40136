# SPDX-License-Identifier: Apache-2.0
"""Makes a root of installation: answers, environment, images, folders, preparation; can be repeated and resumed."""
