"""What gets supervised, in which positions, and what is refused."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lilicorr_hf.training.data import BlockDataset, Example, collate, read_examples


CHAT = [
    {"role": "user", "content": "Say hi"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "content": "Hello"},
]
CHATML = (
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s> \n {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
# Rewrites earlier answers, as templates of reasoning models do.
REWRITING = (
    "{% for m in messages %}<s> {{ m['role'] }} {% if m['role'] == 'assistant' and loop.last %}think {% endif %}"
    "{{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}<s> assistant think {% endif %}"
)
WORDS = "<unk> <s> </s> user assistant system think Say hi Hi there Again Hello".split()


@pytest.fixture
def tokenizer():
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML, **tokens)


def supervised(example: Example, tokenizer) -> str:
    return tokenizer.decode([i for i, written in zip(example.input_ids, example.loss_mask, strict=True) if written])


def test_answers_and_their_end_tokens_are_supervised_and_nothing_else(tokenizer):
    (example,) = read_examples([{"messages": CHAT}], tokenizer, 100, 4)
    assert supervised(example, tokenizer) == "Hi there </s> Hello </s>"


def test_template_that_rewrites_earlier_turns_gives_one_example_a_turn(tokenizer):
    tokenizer.chat_template = REWRITING
    examples = read_examples([{"messages": CHAT}], tokenizer, 100, 4)
    assert [supervised(example, tokenizer) for example in examples] == ["Hi there </s>", "Hello </s>"]
    assert tokenizer.decode(examples[1].input_ids) == (
        "<s> user Say hi </s> <s> assistant Hi there </s> <s> user Again </s> <s> assistant think Hello </s>"
    )


def test_nothing_behind_the_end_token_of_the_target_is_supervised(tokenizer):
    """Gemma's turns end with a token that is not the tokenizer's own, and its template adds a line break."""
    tokenizer.eos_token = "<unk>"
    tokenizer.chat_template = CHATML.replace("</s>", "</s> system")
    end = tokenizer.convert_tokens_to_ids("</s>")
    (example,) = read_examples([{"messages": CHAT}], tokenizer, 100, 4, [end])
    assert supervised(example, tokenizer) == "Hi there </s> Hello </s>"
    with pytest.raises(ValueError, match="Hi there system"):
        read_examples([{"messages": CHAT}], tokenizer, 100, 4)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Say hi", "completion": "Hi there"},
        {"prompt": CHAT[:1], "completion": CHAT[1:2]},
        {"conversations": [{"from": "human", "value": "Say hi"}, {"from": "gpt", "value": "Hi there"}]},
        {"messages": CHAT[:2]},
    ],
)
def test_formats(tokenizer, row):
    (example,) = read_examples([row], tokenizer, 100, 4)
    assert supervised(example, tokenizer) == "Hi there </s>"


def test_pretokenised_rows_need_no_tokenizer():
    (example,) = read_examples([{"prompt_ids": [1, 2], "response_ids": [3, 4, 5]}], None, 100, 4)
    assert example == Example([1, 2, 3, 4, 5], [0, 0, 1, 1, 1])
    assert example.anchors == [2, 3]


# Answers apart by a prompt, so that a cut may fall into either.
MASK = [0] * 5 + [1] * 12 + [0] * 4 + [1] * 9


@pytest.mark.parametrize("max_length", range(8, 31))
def test_truncation_leaves_every_block_whole(max_length):
    """Blocks of 4: one is open after the cut if and only if the cut took no supervised slot from it."""
    whole = Example(list(range(30)), MASK)
    cut = whole.truncated(max_length, 4)
    assert cut.input_ids == whole.input_ids[:max_length] and cut.loss_mask == MASK[:max_length]
    assert cut.anchors == [i for i in whole.anchors if i < max_length and 1 not in MASK[max_length : i + 4]]


def test_rows_are_cut_at_the_end():
    (example,) = read_examples([{"prompt_ids": [1, 2], "response_ids": [3, 4, 5, 6, 7]}], None, 6, 3)
    assert example.input_ids == [1, 2, 3, 4, 5, 6] and example.anchors == [2, 3]


@pytest.mark.parametrize(
    "rows, words",
    [
        ([{"text": "x"}], "Row 1 has none of"),
        ([{"messages": CHAT[:1]}], "nothing would be trained on"),
        ([{"prompt_ids": [1, 2, 3], "response_ids": [4, 5]}], "nothing would be trained on"),
    ],
)
def test_rows_that_teach_nothing_are_an_error(tokenizer, rows, words):
    with pytest.raises(ValueError, match=words):
        read_examples(rows, tokenizer, 3, 4)


def test_template_that_changes_answers_is_an_error(tokenizer):
    tokenizer.chat_template = CHATML.replace("m['content']", "m['content'] | replace('Hi', 'Hello')")
    with pytest.raises(ValueError, match="Hello there.*Hi there"):
        read_examples([{"messages": CHAT[:2]}], tokenizer, 100, 4)


def test_template_whose_prompt_is_not_a_prefix_is_an_error(tokenizer):
    tokenizer.chat_template = CHATML.replace("<s> assistant {% endif %}", "<s> think {% endif %}")
    with pytest.raises(ValueError, match="behind its own generation prompt"):
        read_examples([{"messages": CHAT[:2]}], tokenizer, 100, 4)


def test_real_template_without_marks(smollm2):
    tokenizer = smollm2[1]
    (example,) = read_examples([{"messages": CHAT}], tokenizer, 200, 4)
    assert supervised(example, tokenizer) == "Hi there<|im_end|>Hello<|im_end|>"
    assert tokenizer.decode(example.input_ids).startswith("<|im_start|>system\n")


def test_anchors_are_seeded_by_row_and_epoch_and_lie_where_something_is_supervised():
    example = Example(list(range(40)), [0] * 10 + [1] * 20 + [0] + [1] * 9)
    data = BlockDataset([example] * 3, max_anchors=6, seed=1)
    first = [data[i]["anchors"] for i in range(3)]
    assert first == [data[i]["anchors"] for i in range(3)]
    assert len({tuple(anchors) for anchors in first}) == 3
    assert all(len(set(a)) == 6 and all(10 <= i < 39 and i not in (29, 30) for i in a) for a in first)
    data.epoch = 1
    assert [data[i]["anchors"] for i in range(3)] != first


def test_rows_are_padded_on_the_right():
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "position_ids": [0, 0, 1], "anchors": [1]},
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 1, 1], "position_ids": [*range(5)], "anchors": [1, 3]},
    ]
    batch = collate(rows)
    assert batch["input_ids"].tolist()[0] == [5, 6, 7, 0, 0]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert batch["loss_mask"].tolist()[0] == [0, 1, 1, 0, 0]
    assert batch["keep"].tolist() == [[True, False], [True, True]]
    assert batch["anchors"].dtype == torch.long
