# SPDX-License-Identifier: Apache-2.0
import shutil
from pathlib import Path

import pytest

from llmb.catalogue.catalogue import DATA, Catalogue


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    return Catalogue()


@pytest.fixture
def data_copy(tmp_path: Path) -> Path:
    """A copy of the catalogue's data that a test may spoil."""
    return Path(shutil.copytree(DATA, tmp_path / "data"))
