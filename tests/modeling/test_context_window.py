"""A drafter that sees and keeps the last rows of its context only."""

import pytest
import torch
from tiny import tiny_assistant, tiny_target
from transformers.cache_utils import DFlashCache

from lilicorr_hf import LiLiCorrDraftModel, record, stock_loop
from lilicorr_hf.modeling.configuration_lilicorr import LiLiCorrConfig
from lilicorr_hf.modeling.target_lilicorr import TargetTables, tapped_states


PROMPT = torch.tensor([[1, 5, 9, 12, 40, 33, 2, 8, 19]])
OPTIONS = {"do_sample": False, "max_new_tokens": 24}


class Watched(LiLiCorrDraftModel):
    """Notes how many context rows each draft saw, and how many its cache kept of them."""

    def draft(self, context_states, anchor_ids, position_ids, cache, tables, **kwargs):
        seen = cache.get_seq_length() + context_states.shape[1]
        output = super().draft(context_states, anchor_ids, position_ids, cache, tables, **kwargs)
        self.rows.append((seen, cache.get_seq_length(), context_states.untyped_storage().nbytes()))
        return output


def watched(window: int | None) -> Watched:
    assistant = tiny_assistant(0, Watched, context_window=window)
    assistant.rows = []
    return assistant


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama").float()


def decode(target, assistant, prompt=PROMPT, **options):
    with record(lattice=True) as r:
        output = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), assistant_model=assistant, **OPTIONS | options
        )
    return output, r


@pytest.mark.parametrize("loop", ["ours", "stock"])
@pytest.mark.parametrize("window", [1, 4, 7, 100])
@torch.no_grad()
def test_every_draft_is_that_of_the_last_rows_alone(target, window, loop):
    """Against a fresh drafter given nothing but these rows, at their positions."""
    assistant = watched(window)
    if loop == "stock":
        with stock_loop():
            text, r = decode(target, assistant)
    else:
        text, r = decode(target, assistant)
    assert text.equal(target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **OPTIONS))
    hidden = tapped_states(target(text, output_hidden_states=True).hidden_states, assistant.config.target_layer_ids)
    fresh, anchor = tiny_assistant(), PROMPT.shape[1]
    blocks = [block for block in r.blocks if block.lattice is not None]
    assert len(blocks) > 5
    for block in blocks:
        first = max(anchor - window, 0)
        expected = fresh.draft(
            hidden[:, first:anchor].float(),
            text[:, anchor : anchor + 1],
            torch.arange(first, anchor + fresh.config.block_size).unsqueeze(0),
            DFlashCache(config=fresh.config),
            TargetTables(target),
        )
        torch.testing.assert_close(block.lattice.pair_scores, expected.lattice.pair_scores, atol=1e-4, rtol=1e-4)
        anchor += block.accepted + 1
    assert max(seen for seen, _, _ in assistant.rows) <= window


def test_no_more_is_kept_than_the_window(target):
    """Neither in the cache nor, from the prompt on, in the states that wait to be read."""
    assistant = watched(4)
    decode(target, assistant, PROMPT.repeat(1, 8))
    width = 4 * len(assistant.config.target_layer_ids) * assistant.config.hidden_size
    assert all(kept <= 4 and size <= (4 + assistant.config.block_size) * width for _, kept, size in assistant.rows)
    whole = watched(None)
    decode(target, whole, PROMPT.repeat(1, 8))
    assert whole.rows[0][1] == 72


def test_rows_of_a_batch(target):
    """Padded rows, which part as they go."""
    batch = torch.cat([PROMPT, torch.nn.functional.pad(PROMPT[:, 4:], (4, 0))])
    mask = torch.ones_like(batch)
    mask[1, :4] = 0
    plain = target.generate(batch, attention_mask=mask, **OPTIONS)
    for window in (1, 3, 6):
        output = target.generate(batch, attention_mask=mask, assistant_model=watched(window), **OPTIONS)
        assert output.equal(plain)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("chunk", [1, 4, 9, 50])
def test_prompts_read_in_chunks(target, window, chunk):
    """The drafter sees what it would see of a prompt read at once, and keeps no more of it."""
    prompt = PROMPT.repeat(1, 3)
    whole, chunked = watched(window), watched(window)
    text, expected = decode(target, whole, prompt)
    actual_text, actual = decode(target, chunked, prompt, prefill_chunk_size=chunk)
    assert actual_text.equal(text) and chunked.rows[0][0] == (window or prompt.shape[1])
    assert actual.accepted == expected.accepted
    for ours, theirs in zip(actual.blocks, expected.blocks, strict=True):
        if theirs.lattice is not None:
            torch.testing.assert_close(ours.lattice.pair_scores, theirs.lattice.pair_scores, atol=1e-4, rtol=1e-4)


def test_padded_rows_read_in_chunks(target):
    batch = torch.cat([PROMPT, torch.nn.functional.pad(PROMPT[:, 4:], (4, 0))])
    mask = torch.ones_like(batch)
    mask[1, :4] = 0
    options = {"attention_mask": mask, "prefill_chunk_size": 3} | OPTIONS
    plain = target.generate(batch, **options)
    recorded = []
    for extra in ({}, {"prefill_chunk_size": None}):
        with record() as r:
            output = target.generate(batch, assistant_model=watched(5), **options | extra)
        assert output.equal(plain)
        recorded.append(r.accepted)
    assert recorded[0] == recorded[1]


def test_a_window_of_nothing_is_refused():
    with pytest.raises(Exception, match="context_window"):
        LiLiCorrConfig(context_window=0)
    assert LiLiCorrConfig().context_window is None
