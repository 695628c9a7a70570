"""Our decoding loop on targets that are wrapped, quantised, compiled, spread out or shared by processes."""

import gc
import subprocess
import sys

import pytest
import torch
from calls import GREEDY, static_takes_back
from tiny import Oracle, tiny_assistant, tiny_target
from transformers import CompileConfig, StoppingCriteria

import lilicorr_hf
from lilicorr_hf.measure import run_generate
from lilicorr_hf.pairs import place_of


PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9]])
BATCH = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])


def assert_same(target, prompt=PROMPT, **kwargs):
    """Greedy tokens with an oracle equal those without, in fewer passes; the oracle has answers for the first row."""
    assistant = tiny_assistant(0, Oracle)
    plain = target.generate(prompt, **GREEDY | kwargs)
    assistant.answer = plain[:1]
    with lilicorr_hf.record() as recording:
        assisted = target.generate(prompt, assistant_model=assistant, **GREEDY | kwargs)
    assert assisted.tolist() == plain.tolist()
    assert recording.target_passes < 18
    return plain


def test_adapters_on_off_and_switched():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_target("llama").float(), config, adapter_name="one").eval()
    model.add_adapter("two", config)
    texts = []
    for name in ("one", "two", "one"):
        model.set_adapter(name)
        texts.append(assert_same(model).tolist())
        assert_same(model, BATCH[:1].repeat(2, 1))
    with model.disable_adapter():
        texts.append(assert_same(model).tolist())
    assert texts[0] == texts[2] and texts[0] != texts[1] != texts[3]


def test_dynamic_int8():
    target = tiny_target("llama").float()
    quantised = torch.ao.quantization.quantize_dynamic(target, {torch.nn.Linear}, dtype=torch.qint8)
    assert type(quantised.lm_head) is not torch.nn.Linear
    # One scale for all rows of an activation: a block and a single step round differently.
    plain = quantised.generate(PROMPT, **GREEDY)
    assistant = tiny_assistant(0, Oracle)
    assistant.answer = plain
    assisted = quantised.generate(PROMPT, assistant_model=assistant, **GREEDY)
    assert assisted.shape == plain.shape and assisted[0, :7].tolist() == plain[0, :7].tolist()


def test_compiled():
    target = tiny_target("llama")
    target.forward = torch.compile(target.forward, backend="eager", dynamic=True)
    assert_same(target)


@static_takes_back
def test_compiled_passes_have_one_width():
    """Compiled by transformers' own arguments, for a static cache: once, whatever is left to draft at the end."""
    target, assistant = tiny_target("llama"), tiny_assistant(0, Oracle)
    graphs = []

    def backend(graph, inputs, **options):
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(backend=backend, dynamic=False)
    config._compile_all_devices = True
    options = GREEDY | {"cache_implementation": "static"}
    plain = assistant.answer = target.generate(PROMPT, **options, disable_compile=True)
    with lilicorr_hf.record() as recording:
        assisted = target.generate(PROMPT, assistant_model=assistant, **options, compile_config=config)
    assert torch.equal(assisted, plain)
    widths = [block.drafted for block in recording.blocks]
    assert len(set(widths)) > 1 and widths.count(assistant.num_drafted) > 1
    assert len(graphs) == 1


@static_takes_back
def test_compiled_by_generate_itself():
    """As it does on accelerators where the cache has a fixed size."""
    config = CompileConfig(backend="eager", fullgraph=False, mode=None)
    config._compile_all_devices = True
    assert_same(tiny_target("llama"), cache_implementation="static", compile_config=config)


# Half of a target's weights on disk, tapped layers among them.
SPLIT = {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
PLACES = {
    "output head": {"model": "cpu", "lm_head": "disk"},
    "embedding and every other layer": SPLIT | {f"model.layers.{i}": ("cpu", "disk")[i % 2] for i in range(4)},
    "everything": {"model": "disk", "lm_head": "disk"},
}


@pytest.mark.parametrize("name", PLACES)
def test_weights_that_are_elsewhere_until_a_module_is_called(tmp_path, name):
    """Embedding and output head are called, not indexed: on disk there is nothing to index."""
    from accelerate import dispatch_model

    target = tiny_target("llama")
    target = dispatch_model(target, PLACES[name], main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert any(parameter.device.type == "meta" for parameter in target.parameters())
    assert_same(target)
    assert_same(target, BATCH)
    # Loading and timing ask where a target computes.
    assert place_of(target).type == "cpu"
    assert run_generate(target, {"input_ids": PROMPT}, **GREEDY).tokens == 17


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_writes_as_many_tokens(dtype):
    target, assistant = tiny_target("llama").to(dtype), tiny_assistant().to(dtype)
    assert target.generate(BATCH, assistant_model=assistant, **GREEDY).shape == (2, 23)


class Census(StoppingCriteria):
    """Bytes of all live tensors at some lengths, those of the target's cache left out."""

    def __init__(self, at):
        self.at, self.bytes, self.tensors = at, [], []

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] in self.at:
            live = [x for x in gc.get_objects() if type(x) is torch.Tensor]
            self.tensors.append(len(live))
            # Whatever grows with the text is as long as it in some dimension, and so longer than this from the first
            # count on; tensors that other tests left alive are the same in both.
            self.bytes.append(sum(x.nbytes for x in live if max(x.shape, default=0) < self.at[0] - 20))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_memory_is_flat_apart_from_caches():
    """300 rounds in which nothing is accepted."""
    census = Census(at=(106, 306))
    target = tiny_target("llama", max_position_embeddings=1024)
    options = GREEDY | {"max_new_tokens": 301, "stopping_criteria": [census]}
    target.generate(PROMPT, assistant_model=tiny_assistant(), **options)
    assert census.tensors[1] <= census.tensors[0] + 5
    assert census.bytes[1] <= census.bytes[0] * 1.05


PROCESS = """
import sys
import torch
import torch.distributed as dist
sys.path.insert(0, {support!r})
from tiny import Oracle, tiny_assistant, tiny_target

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method={store!r}, rank=rank, world_size=2)
target, assistant = tiny_target("llama"), tiny_assistant(0, Oracle)
passes = []
target.register_forward_pre_hook(lambda *_: passes.append(1))
prompt = torch.tensor([[3, 1, 4, 1, 5]])
plain = target.generate(prompt, do_sample=False, max_new_tokens=[4, 30][rank])
assistant.answer = plain if rank == 0 else (plain + 1) % 64
passes.clear()
output = target.generate(
    prompt, do_sample=False, max_new_tokens=[4, 30][rank], assistant_model=assistant, synced_gpus=True
)
assert output.tolist() == plain.tolist()
print(len(passes))
"""


def test_processes_that_share_shards_make_the_same_number_of_passes(tmp_path):
    """One is done long before the other, and keeps it company."""
    from goldens import GOLDEN

    support, store = str(GOLDEN.parent / "support"), f"file://{tmp_path / 'store'}"
    code = PROCESS.format(support=support, store=store)
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    passes = [process.communicate(timeout=300)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert passes[0] == passes[1] == "30"
