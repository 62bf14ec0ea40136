# SPDX-License-Identifier: Apache-2.0
"""``python -m llmb``."""

from llmb.cli.main import main

if __name__ == "__main__":
    main()
