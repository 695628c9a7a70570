"""How often a block makes the host wait for its device."""

import pytest
import torch
from calls import PROMPT, static_takes_back
from tiny import tiny_assistant, tiny_target
from waits import waits

from lilicorr_hf import DFlashModel, LiLiCorrDraftModel
from lilicorr_hf.modeling.decoding_lilicorr import BlockDecoder


@pytest.fixture
def rounds(monkeypatch):
    """What each block of a call waited for. Tests leave out the first, which sets caches up, and the shorter last."""
    found = []
    decode = BlockDecoder.decode_block

    def decode_block(self):
        with waits() as names:
            decode(self)
        found.append(names)

    monkeypatch.setattr(BlockDecoder, "decode_block", decode_block)
    return found


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama").float()


def generate(target, assistant, **kwargs):
    return target.generate(PROMPT, max_new_tokens=12, do_sample=False, assistant_model=assistant, **kwargs)


def test_all_kinds_of_waiting_are_seen():
    x = torch.tensor([1, 2])
    with waits() as names:
        _ = bool(x.any()), int(x[0]), x.tolist(), x.cpu(), x[x > 1], torch.equal(x, x), torch.arange(2)
        _ = x + torch.arange(2, device=x.device)
    assert names == [*2 * ["_local_scalar_dense"], "tolist", "cpu", "index", "equal", "arange"]


@pytest.mark.parametrize("drafter", [LiLiCorrDraftModel, DFlashModel])
@pytest.mark.parametrize("eos", [None, [60, 61]])
def test_a_greedy_block_waits_once(target, rounds, drafter, eos):
    generate(target, tiny_assistant(0, drafter), eos_token_id=eos)
    assert len(rounds) > 3 and all(names == ["tolist"] for names in rounds[1:-3])


def test_without_a_mask_of_the_callers_too(target, rounds):
    target.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=12, assistant_model=tiny_assistant()
    )
    assert len(rounds) > 3 and all(names == ["tolist"] for names in rounds[1:-3])


@static_takes_back
def test_with_a_static_cache_transformers_mask_asks_once_more(target, rounds):
    generate(target, tiny_assistant(), cache_implementation="static")
    assert len(rounds) > 3 and all(names == ["_local_scalar_dense", "tolist"] for names in rounds[1:-3])


def test_a_paced_draft_is_cut_by_probabilities_that_are_read_first(target, rounds):
    generate(target, tiny_assistant(adaptive_draft=True))
    assert ["tolist", "tolist"] in rounds and max(map(len, rounds[1:-3])) == 2


def test_rows_of_a_batch_in_step_wait_once(target, rounds):
    target.generate(PROMPT.expand(3, -1), max_new_tokens=12, do_sample=False, assistant_model=tiny_assistant())
    assert len(rounds) > 3 and all(names == ["tolist"] for names in rounds[1:-3])
