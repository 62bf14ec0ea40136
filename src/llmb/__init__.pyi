# SPDX-License-Identifier: Apache-2.0
from llmb.api import Run as Run
from llmb.api import RunComparison as RunComparison
from llmb.api import Runs as Runs
from llmb.api import RunVerdict as RunVerdict
from llmb.api import compare as compare
from llmb.api import judge as judge
from llmb.api import list_runs as list_runs
from llmb.api import parse as parse
from llmb.api import recipe as recipe
from llmb.api import result as result
from llmb.api import run as run

__version__: str
