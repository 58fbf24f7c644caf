"""The engine beside transformers and peft, in float32: every logprob, and the greedy tokens.

Prompts are longer than a step, so every row here went through chunked prefill and a paged cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.helpers import greedy, ids, tokens
from peft import PeftModel
from tiny_models import SEVEN, VOCAB_SIZE, Family, make_adapter, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from truegraft import LLM, LoRARequest
from truegraft.api import Logprob

# peft asks transformers in a way that is on its way out, and warns of tied layers that we mean.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

PROMPTS = [ids(1, 150), ids(2, 70), ids(3, 5)]
STEPS = 10
EVERYTHING = greedy(STEPS, logprobs=VOCAB_SIZE, prompt_logprobs=VOCAB_SIZE)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie": True}),
    "llama without GQA": ("llama", {"num_key_value_heads": 4}),
    "llama with one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama head_dim apart": ("llama", {"head_dim": 32}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama odd widths": ("llama", {"intermediate_size": 100, "rms_norm_eps": 1e-4}),
    "llama theta": ("llama", {"rope_theta": 500000.0}),
    "rope linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "rope llama3": ("llama", {"rope_scaling": LLAMA3}),
    "rope yarn": ("llama", {"rope_scaling": YARN, "max_position_embeddings": 256}),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 40}),
    "mistral window of a block": ("mistral", {"sliding_window": 64}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie": True}),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie": True, "head_dim": 32}),
}


def logprob_rows(entries: Sequence[dict[int, Logprob] | None]) -> Tensor:
    """[rows, V] of whole reported distributions."""
    assert all(entry is not None and len(entry) == VOCAB_SIZE for entry in entries)
    return torch.tensor(
        [[entry[token].logprob for token in range(VOCAB_SIZE)] for entry in entries if entry]
    )


@torch.inference_mode()
def assert_equal(model: Any, llm: LLM, adapters: Sequence[LoRARequest | None]) -> None:
    """Each prompt with its adapter (None: whatever `model` is) against the oracle's one pass."""
    outputs = llm.generate(PROMPTS, EVERYTHING, adapters, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answer = tokens(output)
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0].float()
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert output.outputs[0].logprobs is not None
        ours = logprob_rows([*output.prompt_logprobs[1:], *output.outputs[0].logprobs])
        assert (ours - logits.log_softmax(-1)).abs().max() <= 1e-3
        assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()
    assert outputs[0].num_chunks > 1


def open_llm(path: Path, **options: Any) -> LLM:
    return LLM(path, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=256, **options)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_answers_as_in_transformers(tmp_path: Path, name: str) -> None:
    family, options = MODELS[name]
    path = make_model(tmp_path / "model", family, **options)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with open_llm(path) as llm:
        assert_equal(model, llm, [None] * len(PROMPTS))


@pytest.mark.parametrize("name", ["rope linear", "rope llama3", "rope yarn", "mistral window"])
def test_what_a_config_asks_for_changes_the_oracle(tmp_path: Path, name: str) -> None:
    """Otherwise the comparison above would show nothing."""
    family, options = MODELS[name]
    sequence = torch.tensor([PROMPTS[0]])
    plain, changed = (
        AutoModelForCausalLM.from_pretrained(make_model(tmp_path / folder, family, **fields))
        for folder, fields in (("plain", {}), ("changed", options))
    )
    with torch.inference_mode():
        assert (plain(sequence).logits - changed(sequence).logits).abs().max() > 0.1


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"rank": 5, "alpha": 7}),
        ("llama", {"rank": 17, "targets": [*SEVEN, "embed_tokens", "lm_head"]}),
        ("llama", {"targets": ["embed_tokens"]}),
        ("llama", {"targets": ["lm_head"], "rank": 33}),
        ("llama", {"targets": ["embed_tokens", "lm_head"], "rslora": True}),
        ("qwen2", {"targets": ["k_proj", "down_proj"], "rank_pattern": {"down_proj": 20}}),
        ("qwen3", {"rank": 1, "alpha": 3, "rslora": True}),
        ("mistral", {"rank": 64, "alpha": 16}),
    ],
)
def test_an_adapter_answers_as_in_peft(
    tmp_path: Path, tie: bool, family: Family, options: dict[str, Any]
) -> None:
    path = make_model(tmp_path / "model", family, tie=tie)
    adapter = make_adapter(tmp_path / "adapter", path, seed=5, **options)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter).eval()
    with open_llm(path, enable_lora=True) as llm:
        request = LoRARequest("a", lora_path=str(adapter))
        assert_equal(model, llm, [request] * len(PROMPTS))
        base = llm.generate(PROMPTS[0], EVERYTHING)[0]
        grafted = llm.generate(PROMPTS[0], EVERYTHING, request)[0]
        assert tokens(base) != tokens(grafted), "the adapter must matter"


@pytest.mark.parametrize("target", SEVEN)
def test_an_adapter_on_one_module_type_only(tmp_path: Path, llama: Path, target: str) -> None:
    adapter = make_adapter(tmp_path / "adapter", llama, targets=[target], rank=6, scale_b=0.5)
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter).eval()
    with open_llm(llama, enable_lora=True) as llm:
        request = LoRARequest("a", lora_path=str(adapter))
        assert_equal(model, llm, [request] * len(PROMPTS))
        base, grafted = (llm.generate(PROMPTS[0], EVERYTHING, a)[0] for a in (None, request))
        assert base.outputs[0].logprobs != grafted.outputs[0].logprobs


def test_speculation_answers_as_transformers_too(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with open_llm(
        llama,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 1,
        },
    ) as llm:
        assert_equal(model, llm, [None] * len(PROMPTS))
        repeated = llm.generate([ids(1, 6) * 8], greedy(40))[0].outputs[0]
        assert 0 < repeated.speculation.num_accepted_tokens < repeated.speculation.num_draft_tokens
