# SPDX-License-Identifier: Apache-2.0
"""Files of answers: of this installer, and the headless file of the reference suite's."""

from collections.abc import Callable
from pathlib import Path

import yaml
from pydantic import ValidationError

from llmb.catalogue.data_files import CatalogueError, read_data, read_file, schema_problems
from llmb.errors import UsageError, see
from llmb.install.answers import Answers, answers_schema
from llmb.install.state import put_file
from llmb.reference_suite.headless_file import headless_answers, is_headless_file
from llmb.trust import check_owner

ADVICE = f"{see('install-on-a-cluster')}; 'llmb install --record FILE' writes such a file"
HEAD = "# Answers for 'llmb install --config FILE'; no secrets.\n"


def read_answers(path: Path, say: Callable[[str], None]) -> Answers:
    """The answers of a file of either form. Raises UsageError with all that is wrong in it, and for another user's."""
    check_owner(path)
    try:
        data = read_data(path)
        if not isinstance(data, dict) or not is_headless_file(data):
            return read_file(path, answers_schema(), foreign=True)
        found = headless_answers(path, data, say)
        say(
            f"{path} is a headless file of the reference suite's installer; 'llmb install --record FILE' writes its "
            "answers"
        )
        return answers_schema().model_validate(found)
    except ValidationError as error:
        problems = tuple(schema_problems(path, error))
    except CatalogueError as error:
        problems = error.problems
    lines = "\n".join(f"  {problem}" for problem in problems)
    raise UsageError(f"the file of answers cannot be used:\n{lines}", do=ADVICE)


def write_answers(path: Path, answers: Answers) -> None:
    """Writes them so that only their user can read them. Raises EnvironmentProblem."""
    put_file(path, HEAD + yaml.safe_dump(answers.document(), sort_keys=False, allow_unicode=True), mode=0o600)
