"""Which ranks must agree: the connected component of the groups whose collectives run inside actions."""

import random

import pytest

from rrfp.errors import ConfigurationError
from rrfp.tp_coord.domain import Domain, domain_of


def stage_of(rank):
    return rank // 8


def test_a_rank_without_groups_agrees_with_itself():
    assert domain_of(5, [], stage_of=stage_of) == Domain((5,))
    assert domain_of(5, [(5,), (1, 2)], stage_of=stage_of) == Domain((5,))


def test_tensor_parallelism_alone():
    groups = [(0, 1), (2, 3), (8, 9), (10, 11)]
    assert domain_of(3, groups, stage_of=stage_of) == Domain((2, 3))
    assert domain_of(8, groups, stage_of=stage_of).leader == 8


def test_expert_parallelism_joins_the_replicas():
    """TP 2, EP 2 over two replicas: neither group alone is the domain."""
    tensor, expert = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    assert domain_of(3, tensor + expert, stage_of=stage_of) == Domain((0, 1, 2, 3))
    assert domain_of(3, tensor, stage_of=stage_of) == Domain((2, 3))


def test_members_far_apart_join_through_others():
    assert domain_of(7, [(0, 3), (3, 5), (5, 7), (1, 2)], stage_of=stage_of) == Domain((0, 3, 5, 7))


def test_every_member_computes_the_same_domain(seed):
    rng = random.Random(seed)
    for _ in range(200):
        groups = [rng.sample(range(8), rng.randint(1, 3)) for _ in range(rng.randint(0, 5))]
        domains = [domain_of(rank, groups, stage_of=stage_of) for rank in range(8)]
        for rank, domain in enumerate(domains):
            assert rank in domain.members and all(domains[member] == domain for member in domain.members)
            assert set(domain.others(rank)) == set(domain.members) - {rank}


def test_a_group_across_stages_is_refused():
    with pytest.raises(ConfigurationError, match="the group of ranks 7, 8 spans the pipeline ranks 0, 1: collectives inside"):
        domain_of(7, [(7, 8)], stage_of=stage_of)


@pytest.mark.parametrize("members", [(), (1, 1), (2, 1)])
def test_members_are_distinct_and_sorted(members):
    with pytest.raises(ConfigurationError, match="distinct ranks in ascending order"):
        Domain(members)
