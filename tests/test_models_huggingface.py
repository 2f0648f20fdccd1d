"""Tiny models of the transformers library, made from a config: no download."""

import pytest
import torch
from parity import check, options

transformers = pytest.importorskip("transformers")


def tokens(seed, high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=16, n_embd=12, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=12, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=37, hidden_size=12, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=20, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=37, d_model=12, d_kv=6, d_ff=20, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def causal_loss(model, seed):
    x = tokens(seed, 37, 2, 7)
    result = model(input_ids=x, labels=x, attention_mask=torch.ones_like(x), use_cache=False)
    assert isinstance(result, transformers.utils.ModelOutput) and result["logits"].shape[-1] == 37
    return result.loss


def masked_loss(model, seed):
    x = tokens(seed, 37, 2, 7)
    return model(x, labels=x, token_type_ids=None).loss


def sequence_loss(model, seed):
    return model(input_ids=tokens(seed, 37, 2, 7), labels=tokens(seed + 50, 37, 2, 5)).loss


def checkpointed():
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


CASES = {
    "gpt2": (gpt2, causal_loss),
    "llama": (llama, causal_loss),
    "bert": (bert, masked_loss),
    "t5": (t5, sequence_loss),
    "llama with gradient checkpointing": (checkpointed, causal_loss),
}


def run(rank, world, name):
    make, loss = CASES[name]
    for stage in (2, 3) if name == "gpt2" else (3,):
        torch._dynamo.reset()
        check(rank, world, make, loss, options(stage), steps=2, quiet=False)


@pytest.mark.parametrize("name", CASES)
def test_transformers_model_trains_as_in_plain_pytorch(ranks, name):
    ranks(run, name)
