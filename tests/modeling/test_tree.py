"""Growing trees: the best prefixes as counting all of them finds them, and what a tree knows of its own shape."""

import itertools

import pytest
import torch

from lilicorr_hf import Lattice
from lilicorr_hf.modeling.lattice_lilicorr import candidate_pool, greedy_walk, processed_slots
from lilicorr_hf.modeling.tree_lilicorr import (
    TreeShape,
    best_first_tree,
    conditional_log_probs,
    lattice_tree,
    marginal_tree,
    steered_slots,
    widened_pool,
)
from lilicorr_hf.modeling.tree_pass_lilicorr import DraftTree


def random_log_probs(rows: int, slots: int, width: int, kind: str, seed: int) -> torch.Tensor:
    """`[b, s, P, P]` as [`best_first_tree`] takes them."""
    torch.manual_seed(seed)
    if kind == "random":
        log_probs = torch.randn(rows, slots, width, width).mul(2).log_softmax(dim=-1)
    elif kind == "ties":
        log_probs = -torch.randint(0, 3, (rows, slots, width, width)).float()
    else:
        log_probs = torch.randn(rows, slots, width, width).log_softmax(dim=-1)
        log_probs[torch.rand(log_probs.shape) < 0.4] = -torch.inf
    log_probs[:, :1] = log_probs[:, :1, :1].clone()
    return log_probs


def all_prefixes(log_probs: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The log-probability of every prefix, as candidate indices, of one row `[s, P, P]`."""
    slots, width, _ = log_probs.shape
    scores = {(): 0.0}
    for s in range(slots):
        for prefix in itertools.product(range(width), repeat=s + 1):
            before = prefix[-2] if s else 0
            scores[prefix] = scores[prefix[:-1]] + log_probs[s, before, prefix[-1]].item()
    del scores[()]
    return scores


def prefixes_of(token_ids: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    prefixes = []
    for token, parent in zip(token_ids, parents, strict=True):
        assert -1 <= parent < len(prefixes), "a node without its parent"
        prefixes.append((*(prefixes[parent] if parent >= 0 else ()), token))
    return prefixes


@pytest.mark.parametrize("kind", ["random", "ties", "forbidden"])
@pytest.mark.parametrize(("slots", "width"), [(1, 3), (2, 4), (4, 3), (3, 1)])
@pytest.mark.parametrize("nodes", [1, 2, 5, 16, 200])
def test_tree_is_the_best_of_all_prefixes(kind, slots, width, nodes):
    rows = 3
    log_probs = random_log_probs(rows, slots, width, kind, seed=nodes)
    candidate_ids = torch.arange(width).expand(rows, slots, width)
    token_ids, parents, path_log_probs = best_first_tree(candidate_ids, log_probs, nodes)
    for row in range(rows):
        scores = all_prefixes(log_probs[row])
        found = prefixes_of(token_ids[row].tolist(), parents[row].tolist())
        assert len(found) == len(set(found)) == min(nodes, len(scores))
        ours, best = [scores[prefix] for prefix in found], sorted(scores.values(), reverse=True)[: len(found)]
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(best), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(path_log_probs[row], torch.tensor(ours), atol=1e-5, rtol=1e-5)


def test_tokens_are_those_of_the_candidates():
    log_probs = random_log_probs(1, 3, 4, "random", seed=0)
    ids = torch.randperm(50)[:12].view(1, 3, 4)
    token_ids, parents, _ = best_first_tree(ids, log_probs, 20)
    index, same_parents, _ = best_first_tree(torch.arange(4).expand(1, 3, 4), log_probs, 20)
    assert parents.tolist() == same_parents.tolist()
    for prefix, tokens in zip(
        prefixes_of(index[0].tolist(), parents[0].tolist()),
        prefixes_of(token_ids[0].tolist(), parents[0].tolist()),
        strict=True,
    ):
        assert [ids[0, s, i].item() for s, i in enumerate(prefix)] == list(tokens)


def test_no_slot_is_no_tree():
    for tree in (
        marginal_tree(torch.zeros(2, 0, 9), 4),
        best_first_tree(torch.zeros(2, 0, 3), torch.zeros(2, 0, 3, 3), 4),
    ):
        assert [part.shape for part in tree] == 3 * [(2, 0)]


def test_marginal_tree_is_that_of_products_of_marginals():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5)
    token_ids, parents, _ = marginal_tree(logits, 12)
    log_probs = logits.log_softmax(dim=-1).unsqueeze(2).expand(-1, -1, 5, -1)
    for row in range(2):
        scores = all_prefixes(log_probs[row])
        best = sorted(scores, key=scores.__getitem__, reverse=True)[:12]
        assert set(prefixes_of(token_ids[row].tolist(), parents[row].tolist())) == set(best)


def random_lattice(logits: torch.Tensor, k: int) -> Lattice:
    rows, slots, _ = logits.shape
    ids, log_probs = candidate_pool(logits, k)
    return Lattice(ids, log_probs, torch.randn(rows, k) * 4, torch.randn(rows, slots - 1, k, k) * 4)


def test_widened_pool_has_the_given_candidates_first_and_the_best_of_the_others():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 20)
    given = logits.topk(4).indices.flip(-1)
    ids, log_probs = widened_pool(given, logits, 9)
    assert torch.equal(ids[..., :4], given)
    assert ids.sort(dim=-1).values.tolist() == logits.topk(9).indices.sort(dim=-1).values.tolist()
    torch.testing.assert_close(log_probs, logits.log_softmax(dim=-1).gather(-1, ids))
    assert widened_pool(given, logits, 2)[0].tolist() == given.tolist()
    assert widened_pool(given, logits, 99)[0].shape == (2, 3, 20)


def test_weight_leads_from_the_head_to_the_drafter():
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 30)
    lattice = random_lattice(logits, 3)
    _, log_probs = widened_pool(lattice.candidate_ids, logits, 6)
    drafter = log_probs.unsqueeze(2).expand(-1, -1, 6, -1)
    torch.testing.assert_close(conditional_log_probs(lattice, log_probs, 1.0), drafter)
    mass = log_probs[..., :3].logsumexp(dim=-1)
    for weight in (0.0, 0.4):
        mixed = conditional_log_probs(lattice, log_probs, weight)
        # The head shares out what its candidates have, and nothing else.
        torch.testing.assert_close(mixed[:, 1:, :3, :3].logsumexp(dim=-1), mass[:, 1:, None].expand(-1, -1, 3))
        torch.testing.assert_close(mixed[..., 3:], drafter[..., 3:])
        torch.testing.assert_close(mixed[:, 1:, 3:], drafter[:, 1:, 3:])
        assert torch.equal(mixed[:, 0], mixed[:, 0, :1].expand(-1, 6, -1)) and mixed.max() <= 0
    alone = conditional_log_probs(lattice, log_probs, 0.0)[:, 1, 2, :3]
    torch.testing.assert_close(alone.log_softmax(dim=-1), lattice.pair_scores[:, 0, 2].log_softmax(dim=-1))
    start = conditional_log_probs(lattice, log_probs, 0.0)[:, 0, 0, :3]
    torch.testing.assert_close(start.log_softmax(dim=-1), lattice.start_scores.log_softmax(dim=-1))


def test_a_tree_of_the_head_holds_its_walk_first_where_it_is_sure():
    torch.manual_seed(0)
    logits = torch.randn(1, 4, 30)
    lattice = random_lattice(logits, 3)
    lattice.start_scores, lattice.pair_scores = lattice.start_scores * 9, lattice.pair_scores * 9
    # Nothing but the candidates is likely, so their shares are the whole.
    logits = torch.full_like(logits, -20.0).scatter(-1, lattice.candidate_ids, lattice.log_probs)
    lattice.log_probs = logits.log_softmax(dim=-1).gather(-1, lattice.candidate_ids)
    walk = lattice.candidate_ids.gather(-1, greedy_walk(lattice.start_scores, lattice.pair_scores).unsqueeze(-1))
    token_ids, parents, _ = lattice_tree(lattice, logits, 12, 0.0)
    found = prefixes_of(token_ids[0].tolist(), parents[0].tolist())
    assert all(tuple(walk[0, :length, 0].tolist()) in found[:8] for length in range(1, 5))


def test_no_child_comes_before_its_parent_where_head_and_drafter_are_sure():
    """A sum of probabilities is rounded, and may come out above 1."""
    torch.manual_seed(0)
    for scale in (15.0, 45.0):
        # A few rivals, and others too unlikely to count.
        logits = torch.cat([torch.rand(64, 7, 6) + scale - 14, torch.full((64, 7, 20), -20.0)], dim=-1)
        logits[..., 3] = scale
        ids, log_probs = candidate_pool(logits, 7)
        scores = logits.gather(-1, ids) + 8 * (ids == 3)
        lattice = Lattice(ids, log_probs, scores[:, 0], scores[:, 1:, None].expand(-1, -1, 7, -1))
        assert conditional_log_probs(lattice, log_probs, 0.7).max() <= 0
        for nodes in (4, 7):
            tree = lattice_tree(lattice, None, nodes, 0.7)
            assert (tree.parents < torch.arange(nodes)).all() and (tree.token_ids == 3).all()


def forbid(tokens: list[int]):
    def process(drafted, logits):
        logits[:, tokens] = -torch.inf
        return logits

    return process


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_what_processors_forbid_comes_last_in_a_tree(weight):
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 30)
    lattice = random_lattice(logits, 3)
    banned = lattice.candidate_ids[0, :, 0].tolist() + lattice.candidate_ids[0, 2].tolist()
    slots = steered_slots(logits, TreeShape(8, 3), forbid(banned))
    assert slots.shape == (2, 3, 30)
    for token_ids, _, _ in (lattice_tree(lattice, slots, 8, weight), marginal_tree(slots, 8)):
        assert not set(token_ids.flatten().tolist()) & set(banned)
    assert steered_slots(logits, TreeShape(8, 9), forbid(list(range(30)))).shape == (2, 0, 30)


def test_slots_are_processed_after_the_best_tokens_before_them():
    torch.manual_seed(0)
    logits, seen = torch.randn(2, 4, 9), []

    def no_repeats(drafted, slot_logits):
        seen.append(drafted.tolist())
        return slot_logits.scatter(-1, drafted, -torch.inf)

    chain = processed_slots(logits, no_repeats).argmax(dim=-1)
    assert all(len(set(row)) == 4 for row in chain.tolist())
    assert seen == [chain[:, :s].tolist() for s in range(4)]


#        anchor
#        0:5   1:6
#     2:7 3:5    4:7
#     5:5
TREE = DraftTree(torch.tensor([[5, 6, 7, 5, 7, 5]]), torch.tensor([[-1, -1, 0, 0, 1, 2]]))


def test_children_paths_and_reach():
    steps = {(0, 5): 1, (0, 6): 2, (0, 7): 0, (1, 7): 3, (1, 5): 4, (2, 7): 5, (2, 5): 0, (3, 5): 6, (6, 5): 0}
    for (place, token), child in steps.items():
        assert TREE.child(torch.tensor([place]), torch.tensor([token])).tolist() == [child]
    looks_at = [[j for j, seen in enumerate(row) if seen] for row in TREE.paths()[0].tolist()]
    assert looks_at == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 3, 6]]
    for tokens, reach in (([5, 7, 5, 5], 3), ([5, 5, 7, 5], 2), ([7, 5, 7, 5], 0), ([6, 6, 5, 5], 1)):
        assert TREE.reach(torch.tensor([tokens])).tolist() == [reach]


@pytest.mark.parametrize("nodes", [1, 2, 7, 8, 63, 64])
def test_paths_of_chains(nodes):
    parents = torch.arange(-1, nodes - 1).unsqueeze(0)
    assert torch.equal(DraftTree(parents, parents).paths()[0], torch.ones(nodes + 1, nodes + 1).tril().bool())
