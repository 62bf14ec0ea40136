# SPDX-License-Identifier: Apache-2.0
import pytest
from campaign_files import CampaignFiles

from llmb.catalogue.catalogue import Catalogue


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    return Catalogue()


@pytest.fixture(scope="session")
def files(catalogue: Catalogue, tmp_path_factory: pytest.TempPathFactory) -> CampaignFiles:
    return CampaignFiles(catalogue, tmp_path_factory.mktemp("files"))
