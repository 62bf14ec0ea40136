# SPDX-License-Identifier: Apache-2.0
from llmb.cli.api import Run as Run
from llmb.cli.api import RunComparison as RunComparison
from llmb.cli.api import Runs as Runs
from llmb.cli.api import RunVerdict as RunVerdict
from llmb.cli.api import compare as compare
from llmb.cli.api import judge as judge
from llmb.cli.api import list_runs as list_runs
from llmb.cli.api import parse as parse
from llmb.cli.api import recipe as recipe
from llmb.cli.api import result as result
from llmb.cli.api import run as run

__version__: str
