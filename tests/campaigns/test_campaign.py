# SPDX-License-Identifier: Apache-2.0
"""Records of campaigns."""

from llmb.campaigns.campaign import new_campaign


def test_names_of_campaigns_sort_by_time_within_a_second_too() -> None:
    names = [new_campaign("weekly.txt", (), "").campaign for _ in range(50)]
    assert names == sorted(set(names))
