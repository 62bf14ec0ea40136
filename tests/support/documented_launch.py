# SPDX-License-Identifier: Apache-2.0
"""What ``llmb launch`` orders with the variables of a reference document."""

from collections.abc import Mapping
from pathlib import Path

from llmb.catalogue.catalogue import Catalogue
from llmb.jobs.campaigns.proposal import job_options, job_request
from llmb.jobs.order import Order, make_order
from llmb.launch.documents.variables import read_launch
from llmb.launch.scheduler_lookup import read_cluster_site

CATALOGUE = Catalogue()


def launched(install: Path, workload: str, variables: Mapping[str, str], root: str = "STAGE_PATH") -> Order:
    """Without options; ``root`` is the variable that names the install root."""
    environ = {root: str(install), **variables}
    wanted = read_launch(CATALOGUE, job_options(), environ, workload, {}, {})
    site = read_cluster_site(CATALOGUE, install, environ)
    request = job_request(site, wanted.values, environ)
    return make_order(CATALOGUE, request.request, request.choices, request.options, site, dry_run=True)
